// Products with NEON byte dot products and float16 arithmetic. Shared by the levels neon and i8mm.
//
//     weights in codes     codes by codes: a register holds a quad of codes for 4 rows of a panel
//     weights in float16   float16 by float16: two registers hold one k for all 16 rows of a panel
//
// The bits of a row do not depend on the other rows: sums of codes are exact, and others are added in one order.
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

const int64_t UNPACK_ABOVE = 16;      // rows above which unpacking a panel once costs less than unpacking it for every block of rows
const float MAGIC = 12582912.0f;      // 1.5 * 2^23: an integer added to its bits is a float, except for a constant difference

// A quad of codes of each of 4 rows times the quad LANE of x, both signed.
struct SignedDot {
    static const bool CENTRED = true;  // bytes are signed only if shifted by -128
    template <int LANE> static INLINE int32x4_t add(int32x4_t total, uint8x16_t codes, int8x16_t x) {
        return vdotq_laneq_s32(total, vreinterpretq_s8_u8(codes), x, LANE);
    }
};

// Quads of codes as they are stored. A byte of 4-bit codes belongs to two quads. CENTRED: numbers are shifted by -128
template <Digits D, bool CENTRED> struct StoredQuads {
    static const int COUNT = D == Digits::BYTES ? 1 : 2;
    const uint8_t *w;
    uint8x16_t table;

    StoredQuads(const Matrix &matrix, int64_t stride, int64_t panel, void *)
        : w((const uint8_t *)matrix.data + panel * stride * P / COUNT), table(D == Digits::LOOKED_UP ? vld1q_u8(matrix.table) : vdupq_n_u8(0)) {
        if (D == Digits::LOOKED_UP && CENTRED) table = veorq_u8(table, vdupq_n_u8(128));
    }
    template <int QUAD> INLINE uint8x16_t numbers(uint8x16_t bytes) const {
        if constexpr (D == Digits::BYTES) return CENTRED ? veorq_u8(bytes, vdupq_n_u8(128)) : bytes;
        const uint8x16_t digits = QUAD ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
        return D == Digits::LOOKED_UP ? vqtbl1q_u8(table, digits) : digits;
    }
};

// Prefetches into the L2 cache. Panels are read with long pauses, so the hardware prefetcher would be too late.
const int64_t AFTER = 2;  // panels prefetched: gate and up are unpacked together
INLINE void prefetch_far(const void *from) { __builtin_prefetch(from, 0, 2); }

// The same numbers, each in a byte of its own: [stride / 4][16][4]
template <Digits D, bool CENTRED> struct UnpackedQuads {
    static const int COUNT = 1;
    const uint8_t *w;

    UnpackedQuads(const Matrix &matrix, int64_t stride, int64_t panel, void *memory) : w((const uint8_t *)memory) {
        const StoredQuads<D, CENTRED> stored(matrix, stride, panel, nullptr);
        const int64_t scales = stride / matrix.group * P, bytes = stride * P / stored.COUNT;
        for (int64_t i = (panel + AFTER) * scales; i < (panel + AFTER + 1) * scales; i += 32)
            prefetch_far(matrix.scale + i), prefetch_far(matrix.offset + i);
        const uint8_t *from = stored.w;
        for (uint8_t *to = (uint8_t *)memory, *end = to + stride * P; to < end; from += 64) {
            prefetch_far(from + AFTER * bytes);
            unrolled<stored.COUNT>([&](auto quad) {
                for (int p = 0; p < 4; p++, to += 16) vst1q_u8(to, stored.template numbers<quad>(vld1q_u8(from + 16 * p)));
            });
        }
    }
    template <int QUAD> INLINE uint8x16_t numbers(uint8x16_t bytes) const { return bytes; }
};

template <Digits D, class Dot, template <Digits, bool> class Source> struct DotMath {
    static const int MOST = 4;
    static const bool CENTRED = Dot::CENTRED && D != Digits::NIBBLES;
    using Quads = Source<D, CENTRED>;
    struct Panel {
        int64_t index;
        Quads quads;
    };
    const Matrix &matrix;
    const Rows &rows;

    Panel panel(int64_t index, void *memory) const { return {index, Quads(matrix, rows.stride, index, memory)}; }
    template <int R> void block(int64_t row, const Panel &panel, Lanes *sums) const {
        CodeSums<R, CENTRED> made(matrix, rows, row, panel.index);
        const uint8_t *w = panel.quads.w;
        const int8_t *x = rows.codes + row * rows.stride;
        for (int64_t k = 0; k < rows.stride;) {
            const int64_t start = k;
            int32x4_t totals[R][4];
            for (int r = 0; r < R; r++)
                for (int p = 0; p < 4; p++) totals[r][p] = vreinterpretq_s32_f32(vdupq_n_f32(MAGIC));
            do {
                int8x16_t codes[R];
                for (int r = 0; r < R; r++) codes[r] = vld1q_s8(x + r * rows.stride);
                unrolled<4 / Quads::COUNT>([&](auto part) {
                    __builtin_prefetch(w + PREFETCH_BYTES);
                    add<part * Quads::COUNT>(w, panel.quads, codes, totals);
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
    // 64 bytes of weights times the quad LANE of x, and the next quad if there are two.
    template <int LANE, int R> static INLINE void add(const uint8_t *w, const Quads &quads, const int8x16_t (&x)[R], int32x4_t (&totals)[R][4]) {
        for (int p = 0; p < 4; p++) {
            const uint8x16_t bytes = vld1q_u8(w + 16 * p);
            unrolled<Quads::COUNT>([&](auto quad) {
                const uint8x16_t numbers = quads.template numbers<quad>(bytes);
                for (int r = 0; r < R; r++) totals[r][p] = Dot::template add<LANE + quad>(totals[r][p], numbers, x[r]);
            });
        }
    }
};

// --- float16 -----------------------------------------------------------------------------------------------------------

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

struct HalfMath {  // weights are read in place
    static const int MOST = 8;
    const Matrix &matrix;
    const Rows &rows;
    const int64_t span = span_of(matrix), spans = rows.stride / span;  // the number of spans is even, as K_PAD is two of them

    const float16_t *panel(int64_t index, void *) const { return (const float16_t *)matrix.data + index * rows.stride * P; }
    // float16 sums are added to floats after every span, but in batches of some spans, so that a row's floats stay in registers.
    template <int R> void block(int64_t row, const float16_t *w, Lanes *sums) const {
        const int64_t SOME = 24;
        const int S = R <= 3 ? 2 : 1;
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
                for (int64_t i = 0; i < count; i++) acc = carry(made[i][r], its[i], acc);
                sums[r] = begin + count < spans ? acc : acc * matrix.factor;
            }
        }
    }
};

// --- selection ---------------------------------------------------------------------------------------------------------

// Few, Many: how codes are multiplied, with the same results, for up to UNPACK_ABOVE rows and for more.
template <template <Digits> class Few, template <Digits> class Many> struct HalfChoice {
    static Form form(const Matrix &matrix, int64_t) {
        return has_codes(matrix) ? Form::INT8 : matrix.kind == OCTAVO_F16 ? Form::HALF : Form::FLOAT;
    }

    template <class Run> static void choose(const Matrix &matrix, const Rows &rows, Run run) {
        if (rows.form == Form::HALF) return run(HalfMath{matrix, rows});
        if (rows.form == Form::FLOAT) return choose_float(matrix, rows, run);
        by_digits(matrix, [&](auto digits) {
            if (rows.rows > UNPACK_ABOVE) run(Many<digits>{matrix, rows});
            else run(Few<digits>{matrix, rows});
        });
    }
};

}  // namespace
}  // namespace octavo
