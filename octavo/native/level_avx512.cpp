// AVX-512 with VNNI and BF16: products by hand, the rest compiled for 16 lanes.
#include "attention512.h"
#include "sampling512.h"

namespace octavo {

void fill_avx512(Kernels &kernels) {
    kernels.name = "avx512";
    fill_generic(kernels);
    kernels.form = form_avx512;
    kernels.prepare = prepare_avx512;
    kernels.product = product_avx512;
    kernels.gate_up = gate_up_avx512;
    kernels.attend = attend_avx512;
    kernels.argmax = argmax_avx512;
    kernels.uniform = uniform_row<philox512>;
    kernels.draw = draw_row<philox512>;
}

}  // namespace octavo
