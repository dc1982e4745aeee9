// 16 floats, one for each row of a panel, in the registers of the CPU this file is compiled for:
//
//     AVX-512   1 register of 16        AVX2   2 of 8        SSE2, NEON   4 of 4
//
// Kernels written with Lanes are compiled once for each level. Everything is in an unnamed namespace: code compiled for one
// level must never be used by another.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "octavo.h"
#include "scalar.h"

#define INLINE inline __attribute__((always_inline))  // for functions that compilers might not inline, although they are cheaper than a call

namespace octavo {
namespace {

#if defined(__AVX512F__)
const int WIDTH = 16;
#elif defined(__AVX2__)
const int WIDTH = 8;
#else
const int WIDTH = 4;
#endif
const int LANE_COUNT = 16, PARTS = LANE_COUNT / WIDTH;

typedef float Vector __attribute__((vector_size(4 * WIDTH)));       // one register
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * WIDTH)));

struct Lanes {
    Vector part[PARTS];
};
struct Words {               // integers in the same layout: a word holds the codes of several k of one row
    Integers part[PARTS];
};

#define EACH_PART for (int p = 0; p < PARTS; p++)

INLINE Vector load_vector(const float *from) {
    Vector v;
    memcpy(&v, from, sizeof v);
    return v;
}
INLINE Vector broadcast_vector(float value) { return value - Vector{}; }  // exact for all values, and compilers drop the subtraction

INLINE Lanes broadcast(float value) {
    Lanes r;
    EACH_PART r.part[p] = broadcast_vector(value);
    return r;
}
INLINE Lanes zeros() { return broadcast(0.0f); }

INLINE Lanes load(const float *from) {
    Lanes r;
    EACH_PART r.part[p] = load_vector(from + p * WIDTH);  // part by part: a copy of the whole would go through memory
    return r;
}
INLINE void store(const Lanes &a, float *to) { EACH_PART memcpy(to + p * WIDTH, &a.part[p], sizeof a.part[p]); }

// Loads the first `count` lanes; the others are zero.
INLINE Lanes load_some(const float *from, int64_t count) {
    if (count >= LANE_COUNT) return load(from);
    float values[LANE_COUNT] = {};
    for (int64_t i = 0; i < count; i++) values[i] = from[i];
    return load(values);
}
INLINE void store_some(const Lanes &a, float *to, int64_t count) {
    if (count >= LANE_COUNT) return store(a, to);
    float values[LANE_COUNT];
    store(a, values);
    for (int64_t i = 0; i < count; i++) to[i] = values[i];
}

INLINE Lanes operator+(const Lanes &a, const Lanes &b) {
    Lanes r;
    EACH_PART r.part[p] = a.part[p] + b.part[p];
    return r;
}
INLINE Lanes operator-(const Lanes &a, const Lanes &b) {
    Lanes r;
    EACH_PART r.part[p] = a.part[p] - b.part[p];
    return r;
}
INLINE Lanes operator*(const Lanes &a, const Lanes &b) {
    Lanes r;
    EACH_PART r.part[p] = a.part[p] * b.part[p];
    return r;
}
INLINE Lanes operator/(const Lanes &a, const Lanes &b) {
    Lanes r;
    EACH_PART r.part[p] = a.part[p] / b.part[p];
    return r;
}
INLINE Lanes operator*(const Lanes &a, float b) { return a * broadcast(b); }

// a * b + c, with one rounding if the level has an instruction for it, otherwise with two. Compilers may or may not fuse a product and a
// sum that are written as such, and kernels for few rows and for many must round alike.
INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
INLINE Lanes multiply_add(const Lanes &a, const Lanes &b, const Lanes &c) {
    Lanes r;
    EACH_PART r.part[p] = multiply_add(a.part[p], b.part[p], c.part[p]);
    return r;
}
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// NaN in `a` stays NaN, in both functions.
INLINE Lanes at_least(const Lanes &a, float least) {
    Lanes r;
    EACH_PART r.part[p] = a.part[p] < least ? broadcast_vector(least) : a.part[p];
    return r;
}
INLINE Lanes at_most(const Lanes &a, float most) {
    Lanes r;
    EACH_PART r.part[p] = a.part[p] > most ? broadcast_vector(most) : a.part[p];
    return r;
}
// The larger value in each lane; `a` if one of them is NaN.
INLINE Lanes larger(const Lanes &a, const Lanes &b) {
    Lanes r;
    EACH_PART r.part[p] = b.part[p] > a.part[p] ? b.part[p] : a.part[p];
    return r;
}

INLINE float sum_of(const Lanes &a) {
    Vector total = a.part[0];
    for (int p = 1; p < PARTS; p++) total += a.part[p];
    float result = 0;
    for (int i = 0; i < WIDTH; i++) result += total[i];
    return result;
}
INLINE float largest_in(const Lanes &a) {
    Vector most = a.part[0];
    for (int p = 1; p < PARTS; p++) most = a.part[p] > most ? a.part[p] : most;
    float result = most[0];
    for (int i = 1; i < WIDTH; i++) result = most[i] > result ? most[i] : result;
    return result;
}

#if defined(__AVX512F__)
// Adds neighbouring partial sums of two registers into one register.
inline __m512 fold2(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }

// 8 registers with 8 partial sums for each of two results -> one register of 16 sums.
inline __m512 fold8(const __m512 *a) {
    __m512 b[4], c[2];
    for (int i = 0; i < 4; i++) {
        __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }  // each quarter of b[i]: sums of 4i .. 4i + 3 over a quarter of the lanes
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}
#endif

// The sums of 16 registers, one per lane.
INLINE Lanes sums_of(const Vector *v) {
    Lanes r;
#if defined(__AVX512F__)
    __m512 pairs[8];
    for (int i = 0; i < 8; i++) pairs[i] = fold2((__m512)v[2 * i], (__m512)v[2 * i + 1]);
    r.part[0] = (Vector)fold8(pairs);
#elif defined(__AVX2__)
    for (int p = 0; p < 2; p++, v += 8) {
        auto fold4 = [](const Vector *a) {
            return _mm256_hadd_ps(_mm256_hadd_ps((__m256)a[0], (__m256)a[1]), _mm256_hadd_ps((__m256)a[2], (__m256)a[3]));
        };
        __m256 first = fold4(v), second = fold4(v + 4);
        r.part[p] = (Vector)_mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
    }
#elif defined(__aarch64__)
    for (int p = 0; p < 4; p++, v += 4) {
        float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]), high = vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]);
        r.part[p] = (Vector)vpaddq_f32(low, high);
    }
#else
    for (int p = 0; p < 4; p++)
        for (int i = 0; i < 4; i++, v++) r.part[p][i] = ((*v)[0] + (*v)[1]) + ((*v)[2] + (*v)[3]);
#endif
    return r;
}

// --- 16-bit numbers ----------------------------------------------------------------------------------------------------

INLINE Lanes load_f16(const uint16_t *from) {
    Lanes r;
#if defined(__AVX512F__)
    r.part[0] = (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    EACH_PART r.part[p] = (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8 * p)));
#elif defined(__aarch64__)
    EACH_PART r.part[p] = (Vector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * p)));
#else
    EACH_PART for (int i = 0; i < WIDTH; i++) r.part[p][i] = f16_to_float(from[p * WIDTH + i]);
#endif
    return r;
}

// Numbers too large for float16 become the largest float16; NaN stays NaN.
INLINE void store_f16(const Lanes &a, uint16_t *to) {
    const Lanes held = at_least(at_most(a, LARGEST_F16), -LARGEST_F16);
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)held.part[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    EACH_PART _mm_storeu_si128((__m128i *)(to + 8 * p), _mm256_cvtps_ph((__m256)held.part[p], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    EACH_PART vst1_u16(to + 4 * p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)held.part[p])));
#else
    EACH_PART for (int i = 0; i < WIDTH; i++) to[p * WIDTH + i] = float_to_f16(held.part[p][i]);
#endif
}

// Stores the first `count`, rounded to bfloat16.
INLINE void store_bf16(const Lanes &a, uint16_t *to, int64_t count) {
#if defined(__AVX512BF16__)
    _mm256_mask_storeu_epi16(to, __mmask16(count >= 16 ? 0xffff : (1 << count) - 1), (__m256i)_mm512_cvtneps_pbh((__m512)a.part[0]));
#elif defined(__ARM_FEATURE_BF16)
    uint16_t halves[LANE_COUNT];
    EACH_PART vst1_bf16((bfloat16_t *)(halves + 4 * p), vcvt_bf16_f32((float32x4_t)a.part[p]));
    memcpy(to, halves, size_t(std::min<int64_t>(count, LANE_COUNT)) * 2);
#else
    for (int64_t i = 0; i < std::min<int64_t>(count, LANE_COUNT); i++) to[i] = float_to_bf16(a.part[i / WIDTH][i % WIDTH]);
#endif
}

INLINE Words load_words(const void *from) {
    Words r;
    EACH_PART memcpy(&r.part[p], (const char *)from + p * sizeof r.part[p], sizeof r.part[p]);
    return r;
}

// Pairs of bfloat16: the first of each pair is in the low half of a word.
INLINE Lanes first_bf16(const Words &pairs) {
    Lanes r;
    EACH_PART r.part[p] = (Vector)(pairs.part[p] << 16);
    return r;
}
INLINE Lanes second_bf16(const Words &pairs) {
    Lanes r;
    EACH_PART r.part[p] = (Vector)(pairs.part[p] & int32_t(0xffff0000));
    return r;
}

INLINE Lanes load_bf16(const uint16_t *from) {
    Lanes r;
#if defined(__AVX512F__)
    r.part[0] = (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined(__AVX2__)
    EACH_PART r.part[p] = (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 8 * p))), 16);
#elif defined(__aarch64__)
    EACH_PART r.part[p] = (Vector)vshll_n_u16(vld1_u16(from + 4 * p), 16);
#else
    EACH_PART for (int i = 0; i < WIDTH; i++) r.part[p][i] = bf16_to_float(from[p * WIDTH + i]);
#endif
    return r;
}

INLINE Lanes load_int8(const int8_t *from) {
    Lanes r;
#if defined(__AVX512F__)
    r.part[0] = (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    EACH_PART r.part[p] = (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from + 8 * p))));
#elif defined(__aarch64__)
    int8x16_t codes = vld1q_s8(from);
    int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    r.part[0] = (Vector)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    r.part[1] = (Vector)vcvtq_f32_s32(vmovl_high_s16(low));
    r.part[2] = (Vector)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    r.part[3] = (Vector)vcvtq_f32_s32(vmovl_high_s16(high));
#else
    EACH_PART for (int i = 0; i < WIDTH; i++) r.part[p][i] = float(from[p * WIDTH + i]);
#endif
    return r;
}

// The bit field of each word from `shift` on, with the width of the mask, as a float.
INLINE Lanes digits_of(const Words &words, int shift, int mask) {
    Lanes r;
    EACH_PART r.part[p] = __builtin_convertvector((words.part[p] >> shift) & mask, Vector);
    return r;
}

// --- tables ------------------------------------------------------------------------------------------------------------

// Looks up each byte of the words, which are at most 15, in the table.
INLINE Words looked_up(const Words &places, const uint8_t *table) {
    Words r;
#if defined(__AVX512BW__)
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    r.part[0] = (Integers)_mm512_shuffle_epi8(all, (__m512i)places.part[0]);
#elif defined(__AVX2__)
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    EACH_PART r.part[p] = (Integers)_mm256_shuffle_epi8(all, (__m256i)places.part[p]);
#elif defined(__aarch64__)
    const uint8x16_t all = vld1q_u8(table);
    EACH_PART r.part[p] = (Integers)vqtbl1q_u8(all, (uint8x16_t)places.part[p]);
#else
    uint8_t bytes[sizeof r];
    memcpy(bytes, &places, sizeof r);
    for (uint8_t &byte : bytes) byte = table[byte];
    memcpy(&r, bytes, sizeof r);
#endif
    return r;
}

// The low (or high) half of each byte, as a byte.
INLINE Words low_digits(const Words &words) {
    Words r;
    EACH_PART r.part[p] = words.part[p] & 0x0f0f0f0f;
    return r;
}
INLINE Words high_digits(const Words &words) {
    Words r;
    EACH_PART r.part[p] = (words.part[p] >> 4) & 0x0f0f0f0f;
    return r;
}

// --- powers ------------------------------------------------------------------------------------------------------------

const float LOG2_E = 1.44269504088896341f;

// 2^t for t from -126, where subnormals begin, to 127; smaller t count as -126. NaN stays NaN.
// Accurate to the last bit or two; ROUGH: to a relative error of 3e-6.
template <bool ROUGH = false> INLINE Lanes power(const Lanes &t) {
    const float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the lowest bits
    Lanes r;
    EACH_PART {
        Vector x = t.part[p] < -126.0f ? broadcast_vector(-126.0f) : t.part[p];
        Vector shifted = x + MAGIC, rest = x - (shifted - MAGIC), q;
        auto polynomial = [&](float highest, std::initializer_list<float> others) __attribute__((always_inline)) {
            q = broadcast_vector(highest);
            for (float c : others) q = multiply_add(q, rest, broadcast_vector(c));
        };
        if (ROUGH) polynomial(0.00957010128f, {0.0559178628f, 0.240247443f, 0.693121791f, 0.999999285f});
        else polynomial(0.00132764713f, {0.00967554189f, 0.0555071309f, 0.240221202f, 0.693146944f, 1.00000012f});
        r.part[p] = q * (Vector)(((Unsigned)shifted + 127u) << 23);  // unsigned: the bits of NaN may overflow
    }
    return r;
}

// a / b for b from 1 to 2^126, accurate to the last bit or two.
INLINE Lanes divide(const Lanes &a, const Lanes &b) {
#if defined(__AVX512F__)
    const __m512 below = (__m512)b.part[0], guess = _mm512_rcp14_ps(below);
    return {{(Vector)_mm512_mul_ps((__m512)a.part[0], _mm512_mul_ps(guess, _mm512_fnmadd_ps(guess, below, _mm512_set1_ps(2.0f))))}};
#else
    return a / b;
#endif
}

// x / (1 + exp(-t)): x times the sigmoid of t
INLINE Lanes by_sigmoid(const Lanes &x, const Lanes &t) { return divide(x, broadcast(1.0f) + power(at_most(t * -LOG2_E, 126.0f))); }

INLINE Lanes silu(const Lanes &x) { return by_sigmoid(x, x); }

// x / 2 * (1 + tanh(y)), which is x times the sigmoid of 2 * y, where y = sqrt(2 / pi) * (x + 0.044715 * x^3)
INLINE Lanes gelu(const Lanes &x) {
    const float TWICE_ROOT = 1.59576912160573f;
    return by_sigmoid(x, (x + x * x * x * 0.044715f) * TWICE_ROOT);
}

// The gate of gpt-oss.
INLINE Lanes clamped_gate(const Lanes &gate, const Lanes &up) {
    const float LIMIT = 7, STEEPNESS = 1.702f;
    const Lanes held = at_most(gate, LIMIT);
    return (at_least(at_most(up, LIMIT), -LIMIT) + broadcast(1.0f)) * by_sigmoid(held, held * STEEPNESS);
}

INLINE Lanes gated(int activation, const Lanes &gate, const Lanes &up) {
    if (activation == OCTAVO_SWIGLU) return silu(gate) * up;
    return activation == OCTAVO_GEGLU ? gelu(gate) * up : clamped_gate(gate, up);
}

// cap * tanh(x / cap)
INLINE Lanes capped(const Lanes &x, float cap) {
    const Lanes grown = power(at_most(x * (2 * LOG2_E / cap), 126.0f));  // exp(2 * x / cap)
    return (broadcast(1.0f) - broadcast(2.0f) / (grown + broadcast(1.0f))) * cap;
}

#undef EACH_PART

}  // namespace
}  // namespace octavo
