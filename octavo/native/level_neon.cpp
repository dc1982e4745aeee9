// NEON with byte dot products and float16 arithmetic (ARMv8.2): products of codes and of float16 by hand, the rest compiled for 4 lanes.
#include "attention_neon.h"

namespace octavo {
namespace {

template <Digits D> using Few = DotMath<D, SignedDot, StoredQuads>;
template <Digits D> using Many = DotMath<D, SignedDot, UnpackedQuads>;

}  // namespace

void fill_neon(Kernels &kernels) {
    fill_generic(kernels);
    fill_products<HalfChoice<Few, Many>>(kernels);
    kernels.attend = attend_halves;
}

}  // namespace octavo
