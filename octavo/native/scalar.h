// Scalar functions: float16 and bfloat16 conversions, and an exp, all of which compilers can vectorise. Every level includes this file,
// so all of it is static: code compiled for one level must never be used by another.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float bf16_to_float(uint16_t half) { return bits_to_float(uint32_t(half) << 16); }

static inline uint16_t float_to_bf16(float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float f16_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
    // A float with the exponent in the wrong position; one product corrects it, also for subnormals.
    uint32_t finite = float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f), other = 0x7f800000 | (magnitude & 0x3ff) << 13;
    return bits_to_float(sign | (magnitude < 0x7c00 ? finite : other));
}

const float LARGEST_F16 = 65504;

static inline uint16_t float_to_f16(float value) {  // to nearest, ties to even; for numbers up to LARGEST_F16, and NaN
    uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    // Below 2^-14 float16 has a fixed step of 2^-24: adding 1/2, whose float step is the same, rounds to it.
    uint32_t small = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000;
    uint32_t large = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    return uint16_t(sign | (magnitude > 0x7f800000 ? 0x7e00 : magnitude < 0x38800000 ? small : large));
}

// Relative error below 2e-7 on the range where exp is finite; 0 below it.
static inline float fast_exp(float x) {
    float clamped = x < -87.3f ? -87.3f : x > 88.0f ? 88.0f : x;
    float turns = nearbyintf(clamped * 1.44269504088896341f);
    float rest = clamped - turns * 0.693359375f;
    rest -= turns * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    float result = p * bits_to_float(uint32_t(int32_t(turns) + 127) << 23);
    return x < -87.3f ? 0.0f : result;
}

static inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }
