// Attention of many queries in float16: the keys and values of a tile are copied to the layout of weight panels, and 8 queries at a
// time are multiplied by them like rows of x. The copy costs less than it saves from two dozen queries on.
//
//     scores    queries times panels of 16 keys
//     weights   online softmax in float32, then float16
//     sums      weights times panels of 16 dimensions
#pragma once
#include "neon.h"

namespace octavo {
namespace {

const int64_t CARRY = 32;        // dimensions or keys whose products are summed in float16
const int64_t CHAIN = 8;         // dimensions of scores that are summed in sequence. More would be less accurate than `score_keys`
const int64_t MANY = 24;         // queries from which on the layout pays off
const int ROWS = 8;              // queries multiplied at once
const int MOST_SPANS = 32;       // of CHAIN dimensions
const float MOST_VALUE = 2016;   // 32 of these with weights up to 1 stay below float16's limit, including rounding

struct PanelTile {               // 64 keys of one kv head
    float16_t *keys;             // [64 / 16][dim][16]
    float16_t *values;           // [dim / 16][64][16]
};

// Transposes 8 keys of 8 dimensions. stride: from one dimension to the next; check: 0, unless a key is not finite
INLINE void turn(const float16_t *const *keys, int64_t d, float16_t *to, int64_t stride, float16x8_t &check) {
    uint16x8_t a[8];
    uint32x4_t b[8];
    uint64x2_t c[8];
    for (int i = 0; i < 8; i++) {
        a[i] = vld1q_u16((const uint16_t *)keys[i] + d);
        check = vfmaq_f16(check, vreinterpretq_f16_u16(a[i]), vdupq_n_f16(0));
    }
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

// keys, values: addresses of each. Returns whether keys are finite, and values at most MOST_VALUE.
inline bool lay_out(const float16_t *const *keys, const float16_t *const *values, int64_t dim, const PanelTile &to) {
    float16x8_t most = vdupq_n_f16(0), check = most;
    for (int64_t j = 0; j < KEYS; j += 8) {
        for (int64_t d = 0; d < dim; d += 8) turn(keys + j, d, to.keys + (j / P * dim + d) * P + j % P, P, check);
        for (int64_t i = j; i < j + 8; i++)
            for (int64_t d = 0; d < dim; d += 8) {
                const float16x8_t numbers = vld1q_f16(values[i] + d);
                most = vmaxq_f16(most, vabsq_f16(numbers));
                vst1q_f16(to.values + (d / P * KEYS + i) * P + d % P, numbers);
            }
    }
    return float(vmaxvq_f16(vaddq_f16(most, check))) <= MOST_VALUE;  // false for NaN
}

// 8 rows of x times a panel. add(row, sums) receives the sums of its spans in float16, 2 * ROWS registers apart
template <class Add> INLINE void multiply_panel(const float16_t *w, const float16_t *x, int64_t stride, int64_t span, int64_t spans, Add add) {
    float16x8_t memory[1 + MOST_SPANS][ROWS][2];
    sum_eight_rows(w, x, stride, span, spans, memory);
    for (int r = 0; r < ROWS; r++) add(r, memory[1][r]);
}

// Adds an even number of sums of CHAIN dimensions, in float16 up to CARRY dimensions, and then in float32.
INLINE Lanes carry_chains(const float16x8_t *sums, int64_t count) {
    auto pair = [&](int64_t i, int half) { return vaddq_f16(sums[i * 2 * ROWS + half], sums[(i + 1) * 2 * ROWS + half]); };
    const int64_t fours = CARRY / CHAIN;  // 4
    Lanes acc = zeros();
    for (int64_t i = 0; i < count; i += fours) {
        float16x8_t some[2] = {pair(i, 0), pair(i, 1)};
        if (i + fours <= count) some[0] = vaddq_f16(some[0], pair(i + 2, 0)), some[1] = vaddq_f16(some[1], pair(i + 2, 1));
        acc = carry_finite(some, 0, 1, acc);
    }
    return acc;
}

// 2^t for 16 numbers, like `power`, interleaved to hide latency. The coefficients are loaded each time, because a fused multiply-add
// overwrites its addend.
INLINE void rough_powers(float32x4_t (&t)[4]) {
    const float MAGIC = 12582912.0f, A = 0.0559178628f, B = 0.240247443f, C = 0.693121791f, D = 0.999999285f;
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
    for (int i = 0; i < 4; i++) {
        const int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(shifted[i]), 23);
        t[i] = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(q[i]), exponent));
    }
}

// Converts scores of one query against a tile to float16 weights. See `weigh`.
inline float weigh_halves(Online &state, float *scores, const Sight &sight, float cap, float16_t *to) {
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
    state = {largest, state.total * shrink + sum};
    return shrink;
}

// 8 queries against a tile. See `attend_tile`.
inline void attend_panels(const PanelTile &tile, const float16_t *q, int64_t dim, const Sight *sight, const float *scale, float cap,
                          Online *states, float *sums) {
    alignas(64) float scores[ROWS][KEYS];
    float16_t weights[ROWS][KEYS];
    float shrink[ROWS];
    int64_t first, last;
    join_sights<ROWS>(sight, first, last);
    for (int64_t j = first / P * P; j < last; j += P)
        multiply_panel(tile.keys + j * dim, q, dim, CHAIN, dim / CHAIN, [&](int r, const float16x8_t *made) {
            store(carry_chains(made, dim / CHAIN) * scale[r], scores[r] + j);
        });
    for (int r = 0; r < ROWS; r++) shrink[r] = weigh_halves(states[r], scores[r], sight[r], cap, weights[r]);
    first = first / CARRY * CARRY, last = (last + CARRY - 1) / CARRY * CARRY;
    const int64_t spans = (last - first) / CARRY;
    for (int64_t d = 0; d < dim && first < last; d += P)
        multiply_panel(tile.values + d * KEYS + first * P, weights[0] + first, KEYS, CARRY, spans, [&](int r, const float16x8_t *made) {
            float *to = sums + r * dim + d;
            store(carry_finite(made, 2 * ROWS, spans, load(to) * shrink[r]), to);
        });
}

}  // namespace
}  // namespace octavo
