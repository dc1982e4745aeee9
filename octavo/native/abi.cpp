// What the structs of octavo.h measure here, so that Python can tell a library that is not of its own build.
#include "octavo.h"

extern "C" void octavo_struct_sizes(int64_t *sizes) {
    sizes[0] = sizeof(Matrix);
    sizes[1] = sizeof(Mixture);
    sizes[2] = sizeof(Layer);
    sizes[3] = sizeof(Group);
    sizes[4] = sizeof(Model);
    sizes[5] = sizeof(SharedNode);
    sizes[6] = sizeof(Step);
    sizes[7] = sizeof(Draws);
    sizes[8] = sizeof(Ranking);
}
