// The sizes of the structs in octavo.h, so that Python can detect a library from another build.
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
