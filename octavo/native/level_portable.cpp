// The level every machine has: the generic kernels, compiled for the plainest CPU of its kind.
#include "generic.h"

namespace octavo {

void fill_portable(Kernels &kernels) {
    kernels = {};
    fill_generic(kernels);
}

}  // namespace octavo
