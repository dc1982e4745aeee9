// AVX-512 with bfloat16 products: for large batches, and for attention over bfloat16 caches.
#include "attention512.h"

namespace octavo {

void fill_avx512bf16(Kernels &kernels) {
    fill_products<BF16Choice>(kernels);
    kernels.attend = attend_avx512bf16;
}

}  // namespace octavo
