// The instructions of the level i8mm, written out in those of neon, for measurements on a CPU that lacks them:
//
//     rm -r build/native octavo/native/liboctavo.so                                      in a clone of its own
//     CXXFLAGS="-include $PWD/bench/i8mm_by_hand.h" make native
//     .venv/bin/python bench/perplexity.py wikitext-2-raw-v1_test.txt --cpu-isa i8mm     and with --step 16
//
// Finite numbers give what the real instructions give, which add bfloat16 with rounding to odd. The speed is another.
#pragma once
#include <sys/auxv.h>
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#include <arm_neon.h>

inline int32x4_t dot_by_hand(int32x4_t total, uint8x16_t codes, int8x16_t x, int lane) {
    const int8x16_t quad = vreinterpretq_s8_s32(vdupq_n_s32(vreinterpretq_s32_s8(x)[lane]));
    const int8x16_t centred = vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(128)));
    return vaddq_s32(vdotq_s32(total, centred, quad), vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), quad), 7));
}

// Two rows of codes times two rows of x.
inline int32x4_t squares_by_hand(int32x4_t total, uint8x16_t codes, int8x16_t x) {
    const int8x16_t centred = vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(128)));
    auto dot = [&](int8x8_t row) { return vdotq_s32(vdupq_n_s32(0), vcombine_s8(row, row), x); };
    const int32x4_t sums = dot(vdup_n_s8(1)), made = vpaddq_s32(dot(vget_low_s8(centred)), dot(vget_high_s8(centred)));
    return vaddq_s32(total, vaddq_s32(made, vshlq_n_s32(vpaddq_s32(sums, sums), 7)));
}

// In float64 a sum is exact or nearly so, and is rounded to odd once.
inline float32x4_t add_to_odd(float32x4_t a, float32x4_t b) {
    const float32x2_t low = vcvtx_f32_f64(vaddq_f64(vcvt_f64_f32(vget_low_f32(a)), vcvt_f64_f32(vget_low_f32(b))));
    return vcvtx_high_f32_f64(low, vaddq_f64(vcvt_high_f64_f32(a), vcvt_high_f64_f32(b)));
}

inline float32x4_t pairs_by_hand(float32x4_t total, bfloat16x8_t weights, bfloat16x8_t x, int lane) {
    const uint32x4_t w = vreinterpretq_u32_bf16(weights), n = vdupq_n_u32(vreinterpretq_u32_bf16(x)[lane]), upper = vdupq_n_u32(0xffff0000);
    const float32x4_t first = vmulq_f32(vreinterpretq_f32_u32(vshlq_n_u32(w, 16)), vreinterpretq_f32_u32(vshlq_n_u32(n, 16)));
    const float32x4_t second = vmulq_f32(vreinterpretq_f32_u32(vandq_u32(w, upper)), vreinterpretq_f32_u32(vandq_u32(n, upper)));
    return add_to_odd(total, add_to_odd(first, second));
}

inline uint16x4_t round_by_hand(float32x4_t numbers) {  // finite ones
    const uint32x4_t bits = vreinterpretq_u32_f32(numbers), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}

#define vusdotq_laneq_s32 dot_by_hand
#define vusmmlaq_s32 squares_by_hand
#define vbfdotq_laneq_f32 pairs_by_hand
#define vcvt_bf16_f32(numbers) vreinterpret_bf16_u16(round_by_hand(numbers))
#endif
#define getauxval(what) (getauxval(what) | ((what) == AT_HWCAP2 ? HWCAP2_I8MM | HWCAP2_BF16 : 0))
