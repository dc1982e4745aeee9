// AVX-512 that multiplies bfloat16: for many rows, and for attention over caches of it.
#include "attention512.h"

namespace octavo {

void fill_avx512bf16(Kernels &kernels) {
    fill_products<BF16Choice>(kernels);
    kernels.attend = attend_avx512bf16;
}

}  // namespace octavo
