// AVX2: the generic kernels, compiled for 8 lanes, with FMA and conversions from float16.
#include "generic.h"

namespace octavo {

void fill_avx2(Kernels &kernels) {
    kernels.name = "avx2";
    fill_generic(kernels);
}

}  // namespace octavo
