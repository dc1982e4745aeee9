// Products with NEON byte dot products and float16 arithmetic. Shared by the levels neon and i8mm.
//
//     small batches    codes by codes: a register holds a quad of codes for 4 rows of a panel
//     larger batches   float16 by float16: two registers hold one k for all 16 rows of a panel
#pragma once
#include <utility>

#include "generic.h"

namespace octavo {
namespace {

// Calls run(0), run(1), ... run(COUNT - 1) with compile-time constants, which instructions use as immediates.
template <int COUNT, class Run> INLINE void unrolled(Run run) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (run(std::integral_constant<int, I>()), ...); }(std::make_integer_sequence<int, COUNT>());
}

const int64_t PREFETCH_BYTES = 1024;  // how far ahead weights are prefetched

// --- 8-bit codes ---------------------------------------------------------------------------------------------------------

// A quad of codes of each of 4 rows times the quad LANE of x, both signed.
struct SignedDot {
    static const bool CENTRED = true;  // bytes are signed only if shifted by -128
    template <int LANE> static INLINE int32x4_t add(int32x4_t total, uint8x16_t codes, int8x16_t x) {
        return vdotq_laneq_s32(total, vreinterpretq_s8_u8(codes), x, LANE);
    }
};

template <Digits D, class Dot> struct DotMath {
    static const bool FOUR = D != Digits::BYTES;
    static const int MOST = 4;
    static constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: an integer added to its bits is a float, except for a constant difference
    static const bool CENTRED = Dot::CENTRED && D != Digits::NIBBLES;
    const Matrix &matrix;
    const Rows &rows;

    int64_t panel(int64_t index, void *) const { return index; }
    template <int R> void block(int64_t row, int64_t panel, Lanes *sums) const {
        CodeSums<R, CENTRED> made(matrix, rows, row, panel);
        const uint8_t *w = (const uint8_t *)matrix.data + panel * rows.stride * P / (FOUR ? 2 : 1);
        const int8_t *x = rows.codes + row * rows.stride;
        const uint8x16_t table = numbers();
        for (int64_t k = 0; k < rows.stride;) {
            const int64_t start = k;
            int32x4_t totals[R][4];
            for (int r = 0; r < R; r++)
                for (int p = 0; p < 4; p++) totals[r][p] = vreinterpretq_s32_f32(vdupq_n_f32(MAGIC));
            do {
                int8x16_t codes[R];
                for (int r = 0; r < R; r++) codes[r] = vld1q_s8(x + r * rows.stride);
                unrolled<FOUR ? 2 : 4>([&](auto part) {
                    __builtin_prefetch(w + PREFETCH_BYTES);
                    add<part * (FOUR ? 2 : 1)>(w, table, codes, totals);
                    w += 64;
                });
                k += 16, x += 16;
            } while (k < start + made.span);
            made.add_span(start, [&](int r) {
                Lanes total;
                for (int p = 0; p < 4; p++) total.part[p] = (Vector)totals[r][p] - MAGIC;
                return total;
            });
        }
        made.finish(sums);
    }

private:
    // The table in the form of the dot products.
    uint8x16_t numbers() const {
        if constexpr (D != Digits::LOOKED_UP) return vdupq_n_u8(0);
        else return CENTRED ? veorq_u8(vld1q_u8(matrix.table), vdupq_n_u8(128)) : vld1q_u8(matrix.table);
    }
    static INLINE uint8x16_t number(uint8x16_t digits, uint8x16_t table) { return D == Digits::LOOKED_UP ? vqtbl1q_u8(table, digits) : digits; }

    // 64 bytes of weights times the quad LANE of x, and the next quad if there are two.
    template <int LANE, int R> static INLINE void add(const uint8_t *w, uint8x16_t table, const int8x16_t (&x)[R], int32x4_t (&totals)[R][4]) {
        for (int p = 0; p < 4; p++) {
            const uint8x16_t both = vld1q_u8(w + 16 * p);
            const uint8x16_t first = FOUR ? number(vandq_u8(both, vdupq_n_u8(15)), table) : CENTRED ? veorq_u8(both, vdupq_n_u8(128)) : both;
            for (int r = 0; r < R; r++) totals[r][p] = Dot::template add<LANE>(totals[r][p], first, x[r]);
            if constexpr (FOUR) {
                const uint8x16_t second = number(vshrq_n_u8(both, 4), table);
                for (int r = 0; r < R; r++) totals[r][p] = Dot::template add<LANE + 1>(totals[r][p], second, x[r]);
            }
        }
    }
};

// --- float16 -----------------------------------------------------------------------------------------------------------

const float MOST_HALF = 1024;  // limit of a weight: 32 products with numbers up to 1 stay below float16's limit

// The power of two that scales codes for float16: it brings the largest weight close to MOST_HALF, as far as the power itself
// fits into float16.
inline float half_power(const Matrix &matrix) {
    return matrix.top > 0 ? std::clamp(MOST_HALF / power_above(matrix.top), 0x1p-14f, 0x1p15f) : 1.0f;
}

// Loads a register again: a fused multiply-add overwrites its addend, and a load costs less than a copy.
template <class Register> INLINE Register again(const Register *from) {
    Register r;
    asm volatile("ldr %q0, %1" : "=w"(r) : "m"(*from));
    return r;
}

// 16 quads of codes -> one register for each index in a quad. Faster than the instruction for this load.
INLINE uint8x16x4_t load_quads(const uint8_t *w) {
    const uint8x16_t a = vld1q_u8(w), b = vld1q_u8(w + 16), c = vld1q_u8(w + 32), d = vld1q_u8(w + 48);
    const uint8x16_t even[2] = {vuzp1q_u8(a, b), vuzp1q_u8(c, d)}, odd[2] = {vuzp2q_u8(a, b), vuzp2q_u8(c, d)};
    return {vuzp1q_u8(even[0], even[1]), vuzp1q_u8(odd[0], odd[1]), vuzp2q_u8(even[0], even[1]), vuzp2q_u8(odd[0], odd[1])};
}

// Prefetches into the L2 cache. Panels are read with long pauses, so the hardware prefetcher would be too late.
const int64_t AFTER = 2;  // panels prefetched: gate and up are unpacked together
INLINE void prefetch_far(const void *from) { __builtin_prefetch(from, 0, 2); }

// Unpacks a panel of codes to float16: to [stride][16]
template <Digits D> void unpack_halves(const Matrix &matrix, int64_t stride, int64_t panel, float power, float16_t *to) {
    const bool FOUR = D != Digits::BYTES;
    const int64_t groups = stride / matrix.group, bytes = stride * P / (FOUR ? 2 : 1);
    const uint8_t *w = (const uint8_t *)matrix.data + panel * bytes;
    const uint8x16_t table = D == Digits::LOOKED_UP ? vld1q_u8(matrix.table) : vdupq_n_u8(0);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t place = (panel * groups + g) * P;
        float16x8_t scale[2], offset[2];
        for (int half = 0; half < 2; half++) {
            scale[half] = vmulq_n_f16(vld1q_f16((const float16_t *)matrix.scale + place + 8 * half), float16_t(power));
            offset[half] = vmulq_n_f16(vld1q_f16((const float16_t *)matrix.offset + place + 8 * half), float16_t(power));
        }
        auto put = [&](uint8x16_t codes) {
            // A code in the low bits of 1,024 is the float16 1,024 + code, which is faster than a conversion.
            const uint8x16_t above = vdupq_n_u8(0x64);
            const float16x8_t shifted[2] = {vreinterpretq_f16_u8(vzip1q_u8(codes, above)), vreinterpretq_f16_u8(vzip2q_u8(codes, above))};
            for (int half = 0; half < 2; half++, to += 8)
                vst1q_f16(to, vfmaq_f16(again(offset + half), vsubq_f16(shifted[half], vdupq_n_f16(1024)), scale[half]));
        };
        auto number = [&](uint8x16_t digits) { return D == Digits::LOOKED_UP ? vqtbl1q_u8(table, digits) : digits; };
        prefetch_far(matrix.scale + place + AFTER * groups * P), prefetch_far(matrix.offset + place + AFTER * groups * P);
        for (int64_t k = 0; k < matrix.group; k += FOUR ? 8 : 4, w += 64) {
            prefetch_far(w + AFTER * bytes);
            const uint8x16x4_t quads = load_quads(w);
            for (int i = 0; i < 4; i++) put(FOUR ? number(vandq_u8(quads.val[i], vdupq_n_u8(15))) : quads.val[i]);
            if (FOUR)
                for (int i = 0; i < 4; i++) put(number(vshrq_n_u8(quads.val[i], 4)));
        }
    }
}

// sum + weights * the number LANE of x; FIRST: without the sum. In assembly, because compilers would first copy a number that is needed
// twice to all lanes of a register, and run out of registers.
template <int LANE, bool FIRST = false> inline float16x8_t multiply_add(float16x8_t weights, float16x8_t x, float16x8_t sum) {
    if constexpr (FIRST) asm("fmul %0.8h, %1.8h, %2.h[%3]" : "=w"(sum) : "w"(weights), "x"(x), "i"(LANE));
    else asm("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(sum) : "w"(weights), "x"(x), "i"(LANE));
    return sum;
}

// S spans of R rows times a panel, in float16, one k after the other. Several spans at once if few rows would wait for their
// own sums: the bits of a row do not depend on the other rows.
template <int R, int S> INLINE void sum_spans(const float16_t *w, const float16_t *x, int64_t stride, int64_t span, float16x8_t (*sums)[R][2]) {
    float16x8_t made[S][R][2];
    auto add_eight = [&](int64_t k, auto first) {
        float16x8_t numbers[S][R];
        for (int s = 0; s < S; s++)
            for (int r = 0; r < R; r++) numbers[s][r] = vld1q_f16(x + r * stride + s * span + k);
        unrolled<8>([&](auto lane) {
            for (int s = 0; s < S; s++)
                for (int half = 0; half < 2; half++) {
                    const float16x8_t weights = vld1q_f16(w + (s * span + k + lane) * P + 8 * half);
                    for (int r = 0; r < R; r++)
                        made[s][r][half] = multiply_add<lane, first && lane == 0>(weights, numbers[s][r], made[s][r][half]);
                }
        });
    };
    add_eight(0, std::true_type());
    for (int64_t k = 8; k < span; k += 8) add_eight(k, std::false_type());
    memcpy(sums, made, sizeof made);
}

// The same for 8 rows and `count` spans, in assembly, with loads and stores scheduled without stalls. Sums of a span are stored while
// those of the next begin, so sums[0] receives no valid data, and the first span's sums are in sums[1].
INLINE void sum_eight_rows(const float16_t *w, const float16_t *x, int64_t stride, int64_t span, int64_t count, float16x8_t (*sums)[8][2]) {
    int64_t k = 0, end = 0;
#define EIGHT ".irp row, 0, 1, 2, 3, 4, 5, 6, 7\n"
#define LANE(N)                                                            \
    "ldp q8, q9, [%[w], #32 * " #N "]\n"                                   \
    EIGHT "fmla v1\\row\\().8h, v8.8h, v\\row\\().h[" #N "]\n .endr\n"     \
    EIGHT "fmla v2\\row\\().8h, v9.8h, v\\row\\().h[" #N "]\n .endr\n"
    asm volatile(  // x10 to x17: rows of x; v0 to v7: 8 numbers of each; v10 to v17 and v20 to v27: their sums
        EIGHT "mov x9, #\\row * 2\n madd x1\\row, x9, %[stride], %[x]\n .endr\n"
        "1: add %[end], %[end], %[span]\n ldp q8, q9, [%[w]]\n"
        EIGHT "ldr q\\row, [x1\\row, %[k]]\n stp q1\\row, q2\\row, [%[sums], #32 * \\row]\n"
        "fmul v1\\row\\().8h, v8.8h, v\\row\\().h[0]\n fmul v2\\row\\().8h, v9.8h, v\\row\\().h[0]\n .endr\n"
        "add %[sums], %[sums], #256\n b 3f\n"
        "2: ldp q8, q9, [%[w]]\n"
        EIGHT "ldr q\\row, [x1\\row, %[k]]\n fmla v1\\row\\().8h, v8.8h, v\\row\\().h[0]\n .endr\n"
        EIGHT "fmla v2\\row\\().8h, v9.8h, v\\row\\().h[0]\n .endr\n"
        "3:\n" LANE(1) LANE(2) LANE(3) LANE(4) LANE(5) LANE(6) LANE(7)
        "add %[w], %[w], #256\n add %[k], %[k], #16\n cmp %[k], %[end]\n b.lt 2b\n"
        "cmp %[k], %[all]\n b.lt 1b\n"
        EIGHT "stp q1\\row, q2\\row, [%[sums], #32 * \\row]\n .endr\n"
        : [w] "+&r"(w), [sums] "+&r"(sums), [k] "+&r"(k), [end] "+&r"(end)
        : [x] "r"(x), [stride] "r"(stride), [span] "r"(2 * span), [all] "r"(2 * span * count)
        : "memory", "cc", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9",
          "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27");
#undef LANE
#undef EIGHT
}

// acc + sum * scale, in float32. sum: two registers
INLINE Lanes carry(const float16x8_t *sum, float scale, Lanes acc) {
    for (int half = 0; half < 2; half++) {
        Vector *to = acc.part + 2 * half;
        to[0] = (Vector)vfmaq_n_f32((float32x4_t)to[0], vcvt_f32_f16(vget_low_f16(sum[half])), scale);
        to[1] = (Vector)vfmaq_n_f32((float32x4_t)to[1], vcvt_high_f32_f16(sum[half]), scale);
    }
    return acc;
}

const float MOST_SCALE = 0x1p15f, SHIFTED = 0x1p112f;  // MOST_SCALE: the largest scale of shifted sums

// Converts the upper 4, if finite, to floats that are smaller by SHIFTED. Shifts have a higher throughput than conversions.
INLINE float32x4_t shifted_high(float16x8_t sum) {
    const uint32x4_t kept = vdupq_n_u32(0x8fffffff);  // a signed shift leaves three extra sign bits
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s32(vshll_high_n_s16(vreinterpretq_s16_f16(sum), 13)), kept));
}

// The same for an even number of sums, `stride` registers apart, if they are finite and their scales at most MOST_SCALE.
INLINE Lanes carry_all(const float16x8_t *sums, int64_t stride, int64_t count, const float *scale, Lanes acc) {
    for (int64_t i = 0; i < count; i += 2) {
        const float32x2_t factors = vld1_f32(scale + i), shifted = vmul_n_f32(factors, SHIFTED);
        unrolled<4>([&](auto part) {
            const int next = part / 2, half = part % 2;
            const float16x8_t sum = sums[(i + next) * stride + half];
            Vector *to = acc.part + 2 * half;
            to[0] = (Vector)vfmaq_lane_f32((float32x4_t)to[0], vcvt_f32_f16(vget_low_f16(sum)), factors, next);
            to[1] = (Vector)vfmaq_lane_f32((float32x4_t)to[1], shifted_high(sum), shifted, next);
        });
    }
    return acc;
}

// The same without scales.
INLINE Lanes carry_finite(const float16x8_t *sums, int64_t stride, int64_t count, Lanes acc) {
    for (int64_t i = 0; i < count; i++)
        for (int half = 0; half < 2; half++) {
            const float16x8_t sum = sums[i * stride + half];
            Vector *to = acc.part + 2 * half;
            to[0] += (Vector)vcvt_f32_f16(vget_low_f16(sum));
            to[1] += (Vector)shifted_high(sum) * SHIFTED;
        }
    return acc;
}

struct HalfMath {
    static const int MOST = 8;
    const Matrix &matrix;
    const Rows &rows;
    const float power = has_codes(matrix) ? half_power(matrix) : 1.0f;
    const int64_t span = span_of(matrix), spans = rows.stride / span;  // the number of spans is even, as K_PAD is two of them
    const bool shifts = has_codes(matrix) && matrix.top * power <= MOST_HALF && largest_of(rows.scale, rows.rows * spans) <= MOST_SCALE;

    // In place, or unpacked.
    const float16_t *panel(int64_t index, void *memory) const {
        if (matrix.kind == OCTAVO_F16) return (const float16_t *)matrix.data + index * rows.stride * P;
        by_digits(matrix, [&](auto digits) { unpack_halves<digits>(matrix, rows.stride, index, power, (float16_t *)memory); });
        return (const float16_t *)memory;
    }
    // float16 sums are added to floats after every span, but in batches of some spans, so that a row's floats stay in registers.
    template <int R> void block(int64_t row, const float16_t *w, Lanes *sums) const {
        const int64_t SOME = 24;
        const int S = R <= 3 ? 2 : 1;
        const float factor = matrix.factor / power;
        const float16_t *x = (const float16_t *)rows.halves + row * rows.stride;
        const float *scale = rows.scale + row * spans;
        float16x8_t memory[1 + SOME][R][2], (*made)[R][2] = memory + 1;
        for (int64_t begin = 0; begin < spans; begin += SOME) {
            const int64_t count = std::min(SOME, spans - begin);
            if constexpr (R == 8) sum_eight_rows(w, x, rows.stride, span, count, memory);
            else
                for (int64_t i = 0; i < count; i += S) sum_spans<R, S>(w + i * span * P, x + i * span, rows.stride, span, made + i);
            w += count * span * P, x += count * span;
            for (int r = 0; r < R; r++) {
                const float *its = scale + r * spans + begin;
                Lanes acc = begin ? sums[r] : zeros();
                if (shifts) acc = carry_all(made[0][r], 2 * R, count, its, acc);
                else
                    for (int64_t i = 0; i < count; i++) acc = carry(made[i][r], its[i], acc);
                sums[r] = begin + count < spans ? acc : acc * factor;
            }
        }
    }
};

// --- selection ---------------------------------------------------------------------------------------------------------

template <class Dot> struct HalfChoice {
    template <Digits D> using CodesMath = DotMath<D, Dot>;
    using Others = FloatChoice<CodesMath>;

    static Form form(const Matrix &matrix, int64_t rows) {
        return matrix.kind == OCTAVO_F16 || (has_codes(matrix) && rows > FEW) ? Form::HALF : Others::form(matrix, rows);
    }

    template <class Run> static void choose(const Matrix &matrix, const Rows &rows, Run run) {
        if (rows.form == Form::HALF) run(HalfMath{matrix, rows});
        else Others::choose(matrix, rows, run);
    }
};

}  // namespace
}  // namespace octavo
