// AVX-512 with VNNI: products of codes by hand, the rest compiled for 16 lanes.
#include "avx512.h"
#include "sampling512.h"

namespace octavo {

void fill_avx512(Kernels &kernels) {
    fill_generic(kernels);
    fill_products<Avx512Choice>(kernels);
    kernels.uniform = uniform_row<philox512>;
    kernels.draw = draw_row<philox512>;
}

}  // namespace octavo
