// Products by NEON with dot products of bytes and arithmetic in float16. Shared by the levels neon and i8mm.
//
//     few rows     codes by codes: a register is a quad of codes for 4 rows of a panel
//     more rows    float16 by float16: two registers are one k for all 16 rows of a panel
#pragma once
#include <utility>

#include "generic.h"

namespace octavo {
namespace {

// run(0), run(1), ... run(COUNT - 1), with numbers known to the compiler: instructions have them built in.
template <int COUNT, class Run> INLINE void unrolled(Run run) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (run(std::integral_constant<int, I>()), ...); }(std::make_integer_sequence<int, COUNT>());
}

const int64_t PREFETCH_BYTES = 1024;  // how far ahead weights are asked for

// --- codes of 8 bits ---------------------------------------------------------------------------------------------------

// A quad of codes of each of 4 rows by the quad LANE of x, both signed.
struct SignedDot {
    static const bool CENTRED = true;  // bytes are signed only when counted from -128 on
    template <int LANE> static INLINE int32x4_t add(int32x4_t total, uint8x16_t codes, int8x16_t x) {
        return vdotq_laneq_s32(total, vreinterpretq_s8_u8(codes), x, LANE);
    }
};

template <Digits D, class Dot> struct DotMath {
    static const bool FOUR = D != Digits::BYTES;
    static const int MOST = 4;
    static constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: integers counted up from its bits are floats already, but for a difference
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
    // The table as the dot products read it.
    uint8x16_t numbers() const {
        if constexpr (D != Digits::LOOKED_UP) return vdupq_n_u8(0);
        else return CENTRED ? veorq_u8(vld1q_u8(matrix.table), vdupq_n_u8(128)) : vld1q_u8(matrix.table);
    }
    static INLINE uint8x16_t number(uint8x16_t digits, uint8x16_t table) { return D == Digits::LOOKED_UP ? vqtbl1q_u8(table, digits) : digits; }

    // 64 bytes of weights by the quad LANE of x, and by the one after it where they are two quads.
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

const float MOST_HALF = 1024;  // of a weight: 32 products with numbers up to 1 stay below float16's end

// The power of two that codes are multiplied by on their way to float16: it takes the largest close to MOST_HALF, as far as
// float16 can say that power itself.
inline float half_power(const Matrix &matrix) {
    return matrix.top > 0 ? std::clamp(MOST_HALF / power_above(matrix.top), 0x1p-14f, 0x1p15f) : 1.0f;
}

// What lies there, read again: a sum takes the register that it begins with, and to read costs less than to copy.
template <class Register> INLINE Register again(const Register *from) {
    Register r;
    asm volatile("ldr %q0, %1" : "=w"(r) : "m"(*from));
    return r;
}

// 16 quads of codes -> one register for each place in a quad. Quicker than the instruction that loads them so.
INLINE uint8x16x4_t load_quads(const uint8_t *w) {
    const uint8x16_t a = vld1q_u8(w), b = vld1q_u8(w + 16), c = vld1q_u8(w + 32), d = vld1q_u8(w + 48);
    const uint8x16_t even[2] = {vuzp1q_u8(a, b), vuzp1q_u8(c, d)}, odd[2] = {vuzp2q_u8(a, b), vuzp2q_u8(c, d)};
    return {vuzp1q_u8(even[0], even[1]), vuzp1q_u8(odd[0], odd[1]), vuzp2q_u8(even[0], even[1]), vuzp2q_u8(odd[0], odd[1])};
}

// Into the second-level cache. What panels are made of is read with long pauses, so the hardware would ask for it too late.
const int64_t AFTER = 2;  // panels that are asked for ahead: gate and up are unpacked at once
INLINE void prefetch_far(const void *from) { __builtin_prefetch(from, 0, 2); }

// A panel of codes as float16: to [stride][16]
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
            // Under the bits of 1,024 a code is a float16 that is larger than itself by so much, and quicker made than converted.
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

// sum + weights * the number LANE of x; FIRST: without the sum. Written out, as compilers would copy a number that is needed twice
// to all lanes of a register first, and run out of registers.
template <int LANE, bool FIRST = false> inline float16x8_t multiply_add(float16x8_t weights, float16x8_t x, float16x8_t sum) {
    if constexpr (FIRST) asm("fmul %0.8h, %1.8h, %2.h[%3]" : "=w"(sum) : "w"(weights), "x"(x), "i"(LANE));
    else asm("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(sum) : "w"(weights), "x"(x), "i"(LANE));
    return sum;
}

// S spans of R rows times a panel, in float16, one k after the other. Several spans at once where few rows would wait for their
// own sums: a row gives the same bits whatever it is multiplied with.
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

// The same for 8 rows and `count` spans, written out: loads and stores lie where they wait for nothing. Sums of a span are stored while
// those of the next begin, so what sums[0] gets is of no use, and the first span's lie in sums[1].
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

// acc + sum * scale, as floats. sum: two registers
INLINE Lanes carry(const float16x8_t *sum, float scale, Lanes acc) {
    for (int half = 0; half < 2; half++) {
        Vector *to = acc.part + 2 * half;
        to[0] = (Vector)vfmaq_n_f32((float32x4_t)to[0], vcvt_f32_f16(vget_low_f16(sum[half])), scale);
        to[1] = (Vector)vfmaq_n_f32((float32x4_t)to[1], vcvt_high_f32_f16(sum[half]), scale);
    }
    return acc;
}

const float MOST_SCALE = 0x1p15f, SHIFTED = 0x1p112f;  // MOST_SCALE: of sums that are shifted

// The upper 4, if finite, as floats that are smaller by SHIFTED. Conversions wait for each other, shifts do not wait for them.
INLINE float32x4_t shifted_high(float16x8_t sum) {
    const uint32x4_t kept = vdupq_n_u32(0x8fffffff);  // a shift with sign leaves three more of it
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
    const int64_t span = span_of(matrix), spans = rows.stride / span;  // spans are even in number, as K_PAD is two of them
    const bool shifts = has_codes(matrix) && matrix.top * power <= MOST_HALF && largest_of(rows.scale, rows.rows * spans) <= MOST_SCALE;

    // Where it lies, or unpacked.
    const float16_t *panel(int64_t index, void *memory) const {
        if (matrix.kind == OCTAVO_F16) return (const float16_t *)matrix.data + index * rows.stride * P;
        by_digits(matrix, [&](auto digits) { unpack_halves<digits>(matrix, rows.stride, index, power, (float16_t *)memory); });
        return (const float16_t *)memory;
    }
    // Sums of float16 are carried into floats after every span. Those of some spans wait for it: then a row's floats stay in registers.
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

// --- which is taken ----------------------------------------------------------------------------------------------------

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
