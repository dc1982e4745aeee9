// The sizes of the structs in octavo.h, so that Python can detect a library from another build.
#include "octavo.h"

extern "C" void octavo_struct_sizes(int64_t *sizes) {
    const uint64_t all[] = {sizeof(Matrix), sizeof(Norm), sizeof(Mixture), sizeof(Latent), sizeof(DeltaNet), sizeof(Layer), sizeof(Group), sizeof(Model), sizeof(Step), sizeof(Draws), sizeof(Ranking)};
    for (uint64_t size : all) *sizes++ = int64_t(size);
}
