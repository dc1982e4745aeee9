// The level that every machine has: the generic kernels, compiled for the baseline CPU of the architecture.
#include "generic.h"

namespace octavo {

void fill_portable(Kernels &kernels) {
    kernels = {};
    fill_generic(kernels);
}

}  // namespace octavo
