// NEON with dot products of bytes and arithmetic in float16, as of ARMv8.2: codes and float16 multiplied by hand, the rest compiled for 4 lanes.
#include "attention_neon.h"

namespace octavo {

void fill_neon(Kernels &kernels) {
    fill_generic(kernels);
    fill_products<HalfChoice<SignedDot>>(kernels);
    kernels.attend = attend_halves;
}

}  // namespace octavo
