// Attention of many queries in float16: the keys and values of a tile are copied to the layout of weight panels, and 8 queries at a
// time are multiplied by them like rows of x. The copy costs less than it saves from two dozen queries on. Every number is computed by
// the same operations as in attention_neon.h, so the result has the same bits.
//
//     scores    queries times panels of 16 keys
//     weights   online softmax in float32, then float16
//     sums      weights times panels of 16 dimensions
#pragma once
#include "neon.h"

namespace octavo {
namespace {

const int64_t CARRY = 32;        // keys whose weighted values are summed in float16
const int64_t FOLD = 64;         // dimensions whose products are summed in float16: 8 sums of CHAIN, then the sums of neighbours
const int64_t CHAIN = 8;         // each sum is of dimensions that are 8 apart, in sequence
const int64_t MANY = 24;         // queries from which on the layout pays off
const int ROWS = 8;              // queries multiplied at once
const int MOST_SPANS = 32;       // of CHAIN dimensions

struct PanelTile {               // 64 keys of one kv head
    float16_t *keys;             // [64 / 16][whole folds of dimensions][16]
    float16_t *values;           // [dim / 16][64][16]
};

inline int64_t whole_folds(int64_t dim) { return (dim + FOLD - 1) / FOLD * FOLD; }

// The order of dimensions in panels of keys: those of a CHAIN are neighbours.
inline int64_t place_of(int64_t d) { return d / FOLD * FOLD + d % 8 * CHAIN + d % FOLD / 8; }

// Loads a register again: a fused multiply-add overwrites its addend, and a load costs less than a copy.
template <class Register> INLINE Register again(const Register *from) {
    Register r;
    asm volatile("ldr %q0, %1" : "=w"(r) : "m"(*from));
    return r;
}

// Transposes 8 keys of 8 dimensions. stride: from one dimension to the next
INLINE void turn(const float16_t *const *keys, int64_t d, float16_t *to, int64_t stride) {
    uint16x8_t a[8];
    uint32x4_t b[8];
    uint64x2_t c[8];
    for (int i = 0; i < 8; i++) a[i] = vld1q_u16((const uint16_t *)keys[i] + d);
    for (int i = 0; i < 8; i += 2) {
        b[i] = vreinterpretq_u32_u16(vtrn1q_u16(a[i], a[i + 1]));
        b[i + 1] = vreinterpretq_u32_u16(vtrn2q_u16(a[i], a[i + 1]));
    }
    for (int i : {0, 1, 4, 5}) {
        c[i] = vreinterpretq_u64_u32(vtrn1q_u32(b[i], b[i + 2]));
        c[i + 2] = vreinterpretq_u64_u32(vtrn2q_u32(b[i], b[i + 2]));
    }
    for (int i = 0; i < 4; i++) {
        vst1q_u16((uint16_t *)to + i * stride, vreinterpretq_u16_u64(vtrn1q_u64(c[i], c[i + 4])));
        vst1q_u16((uint16_t *)to + (i + 4) * stride, vreinterpretq_u16_u64(vtrn2q_u64(c[i], c[i + 4])));
    }
}

// keys, values: addresses of each. Dimensions that a head does not have stay as they are.
inline void lay_out(const float16_t *const *keys, const float16_t *const *values, int64_t dim, const PanelTile &to) {
    for (int64_t j = 0; j < KEYS; j += 8) {
        float16_t *panel = to.keys + j / P * whole_folds(dim) * P + j % P;
        for (int64_t d = 0; d < dim; d += 8) turn(keys + j, d, panel + place_of(d) * P, CHAIN * P);
        for (int64_t i = j; i < j + 8; i++)
            for (int64_t d = 0; d < dim; d += 8) vst1q_f16(to.values + (d / P * KEYS + i) * P + d % P, vld1q_f16(values[i] + d));
    }
}

// Adds the sums of CHAIN dimensions, in float16 up to FOLD dimensions, and then in float32.
INLINE Lanes carry_chains(const float16x8_t *sums, int64_t count) {
    Lanes acc = zeros();
    for (int64_t i = 0; i < count; i += FOLD / CHAIN) {
        float16x8_t folded[2];
        for (int half = 0; half < 2; half++) {
            auto pair = [&](int64_t at) { return vaddq_f16(sums[(i + at) * 2 * ROWS + half], sums[(i + at + 1) * 2 * ROWS + half]); };
            folded[half] = vaddq_f16(vaddq_f16(pair(0), pair(2)), vaddq_f16(pair(4), pair(6)));
        }
        acc = carry(folded, 1, acc);
    }
    return acc;
}

// Converts the upper 4, if finite, to floats that are smaller by SHIFTED. Shifts have a higher throughput than conversions.
const float SHIFTED = 0x1p112f;
INLINE float32x4_t shifted_high(float16x8_t sum) {
    const uint32x4_t kept = vdupq_n_u32(0x8fffffff);  // a signed shift leaves three extra sign bits
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s32(vshll_high_n_s16(vreinterpretq_s16_f16(sum), 13)), kept));
}

// Adds sums of CARRY keys that are finite: the same as `carry`.
INLINE Lanes carry_finite(const float16x8_t *sums, int64_t count, Lanes acc) {
    for (int64_t i = 0; i < count; i++)
        for (int half = 0; half < 2; half++) {
            const float16x8_t sum = sums[i * 2 * ROWS + half];
            Vector *to = acc.part + 2 * half;
            to[0] = (Vector)vfmaq_n_f32((float32x4_t)to[0], vcvt_f32_f16(vget_low_f16(sum)), 1);
            to[1] = (Vector)vfmaq_n_f32((float32x4_t)to[1], shifted_high(sum), SHIFTED);
        }
    return acc;
}

// Whether `count` pairs of registers, `stride` registers apart, are finite.
INLINE bool are_finite(const float16x8_t *sums, int64_t stride, int64_t count) {
    float16x8_t check[2] = {};
    for (int64_t i = 0; i < count; i++)
        for (int half = 0; half < 2; half++) check[half] = vfmaq_f16(check[half], sums[i * stride + half], vdupq_n_f16(0));
    return vmaxvq_u16(vreinterpretq_u16_f16(vaddq_f16(check[0], check[1]))) == 0;  // as bits, NaN is larger
}

// 2^t for 16 numbers, like `power<true>`, interleaved to hide latency. The coefficients are loaded each time, because a fused multiply-add
// overwrites its addend.
INLINE void rough_powers(float32x4_t (&t)[4]) {
    const float MAGIC = 12582912.0f + 127, A = 0.0559178628f, B = 0.240247443f, C = 0.693121791f, D = 0.999999285f;
    alignas(16) static const float numbers[4][4] = {{A, A, A, A}, {B, B, B, B}, {C, C, C, C}, {D, D, D, D}};
    float32x4_t shifted[4], q[4];
    for (int i = 0; i < 4; i++) {
        t[i] = vmaxq_f32(t[i], vdupq_n_f32(-126.0f));
        shifted[i] = vaddq_f32(t[i], vdupq_n_f32(MAGIC));
        q[i] = vdupq_n_f32(0.00957010128f);
    }
    for (int i = 0; i < 4; i++) t[i] = vsubq_f32(t[i], vsubq_f32(shifted[i], vdupq_n_f32(MAGIC)));
    for (int step = 0; step < 4; step++)
        for (int i = 0; i < 4; i++) q[i] = vfmaq_f32(again((const float32x4_t *)numbers[step]), q[i], t[i]);
    for (int i = 0; i < 4; i++) t[i] = vmulq_f32(q[i], vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(shifted[i]), 23)));
}

// Converts scores of one query against a tile to float16 weights. See `weigh`. Not inlined: the compiler could round it differently.
__attribute__((noinline)) float weigh_halves(Online &state, float *scores, const Sight &sight, float cap, float16_t *to) {
    const int64_t low = sight.low, high = sight.high;
    if (low >= high) {
        std::fill(to, to + KEYS, float16_t(0));
        return 1.0f;
    }
    if (cap > 0)
        for (int j = 0; j < KEYS; j += LANE_COUNT) store(capped(load(scores + j), cap), scores + j);
    if (sight.slope != 0) add_distances(scores, sight, 1);
    for (int64_t j = 0; j < low; j++) scores[j] = -INFINITY;
    for (int64_t j = high; j < KEYS; j++) scores[j] = -INFINITY;
    float32x4_t most[4], total[4];
    for (int i = 0; i < 4; i++) most[i] = vld1q_f32(scores + 4 * i), total[i] = vdupq_n_f32(0);
    for (int j = 16; j < KEYS; j += 16)
        for (int i = 0; i < 4; i++) most[i] = vmaxnmq_f32(most[i], vld1q_f32(scores + j + 4 * i));
    most[0] = vmaxnmq_f32(vmaxnmq_f32(most[0], most[1]), vmaxnmq_f32(most[2], most[3]));
    const float largest = std::max(state.largest, vmaxnmvq_f32(most[0]));
    for (int j = 0; j < KEYS; j += 16) {
        float32x4_t made[4];
        for (int i = 0; i < 4; i++) made[i] = vmulq_n_f32(vsubq_f32(vld1q_f32(scores + j + 4 * i), vdupq_n_f32(largest)), LOG2_E);
        rough_powers(made);
        for (int i = 0; i < 4; i++) total[i] = vaddq_f32(total[i], made[i]);
        for (int i = 0; i < 4; i += 2) vst1q_f16(to + j + 4 * i, vcvt_high_f16_f32(vcvt_f16_f32(made[i]), made[i + 1]));
    }
    const float sum = vaddvq_f32(vaddq_f32(vaddq_f32(total[0], total[1]), vaddq_f32(total[2], total[3])));
    const float shrink = state.largest == largest ? 1.0f : state.largest == -INFINITY ? 0.0f : fast_exp(state.largest - largest);
    state = {largest, multiply_add(state.total, shrink, sum)};
    return shrink;
}

// 8 queries against a tile. See `attend_tile`. large(row, d): 16 sums of a row whose values are too large for float16
template <class Large>
void attend_panels(const PanelTile &tile, const float16_t *q, int64_t dim, const Sight *sight, const float *scale, float cap, Online *states,
                   float16_t (*weights)[KEYS], float *shrink, float *sums, Large large) {
    alignas(64) float scores[ROWS][KEYS];
    float16x8_t memory[1 + MOST_SPANS][ROWS][2], (*made)[ROWS][2] = memory + 1;
    const int64_t width = whole_folds(dim);
    int64_t first, last;
    join_sights<ROWS>(sight, first, last);
    for (int64_t j = first / P * P; j < last; j += P) {
        sum_eight_rows(tile.keys + j * width, q, width, CHAIN, width / CHAIN, memory);
        for (int r = 0; r < ROWS; r++) store(carry_chains(made[0][r], width / CHAIN) * scale[r], scores[r] + j);
    }
    for (int r = 0; r < ROWS; r++) shrink[r] = weigh_halves(states[r], scores[r], sight[r], cap, weights[r]);
    first = first / CARRY * CARRY, last = (last + CARRY - 1) / CARRY * CARRY;
    const int64_t spans = (last - first) / CARRY;
    for (int64_t d = 0; d < dim && first < last; d += P) {
        sum_eight_rows(tile.values + d * KEYS + first * P, weights[0] + first, KEYS, CARRY, spans, memory);
        const bool finite = are_finite(made[0][0], 2, spans * ROWS);
        for (int r = 0; r < ROWS; r++) {
            float *to = sums + r * dim + d;
            const bool fits = finite || are_finite(made[0][r], 2 * ROWS, spans);
            store(fits ? carry_finite(made[0][r], spans, load(to) * shrink[r]) : large(r, d), to);
        }
    }
}

}  // namespace
}  // namespace octavo
