// ARM with products of unsigned by signed bytes, and of bfloat16. Sums of codes are exact, so a row has the same bits in both kernels.
#include "neon.h"

namespace octavo {
namespace {

// A quad of codes of each of 4 rows, unsigned, times the quad LANE of x, signed.
struct MixedDot {
    static const bool CENTRED = false;
    template <int LANE> static INLINE int32x4_t add(int32x4_t total, uint8x16_t codes, int8x16_t x) {
        return vusdotq_laneq_s32(total, codes, x, LANE);
    }
};

// Two rows of a panel times two rows of x, 8 k at a time. Panels are unpacked to [stride / 8][16][8].
template <Digits D> struct SquaresMath {
    static const int MOST = 4;
    struct Panel {
        int64_t index;
        const uint8_t *w;
    };
    const Matrix &matrix;
    const Rows &rows;

    Panel panel(int64_t index, void *memory) const {
        const UnpackedQuads<D, false> quads(matrix, rows.stride, index, memory);
        for (uint32_t *to = (uint32_t *)memory, *end = to + rows.stride * P / 4; to < end; to += 2 * P) {  // two quads of 16 rows, in place
            uint32x4_t first[4], second[4];
            for (int p = 0; p < 4; p++) first[p] = vld1q_u32(to + 4 * p), second[p] = vld1q_u32(to + P + 4 * p);
            for (int p = 0; p < 4; p++) {
                vst1q_u32(to + 8 * p, vzip1q_u32(first[p], second[p]));
                vst1q_u32(to + 8 * p + 4, vzip2q_u32(first[p], second[p]));
            }
        }
        return {index, quads.w};
    }
    // A pair of rows may be the last row twice.
    template <int R> void block(int64_t row, const Panel &panel, Lanes *sums) const {
        const int PAIRS = (R + 1) / 2;
        CodeSums<R> made(matrix, rows, row, panel.index);
        const uint8_t *w = panel.w;
        const int8_t *x = rows.codes + row * rows.stride;
        for (int64_t k = 0; k < rows.stride;) {
            const int64_t start = k;
            int32x4_t totals[PAIRS][8];
            for (int i = 0; i < PAIRS; i++)
                for (int p = 0; p < 8; p++) totals[i][p] = vreinterpretq_s32_f32(vdupq_n_f32(MAGIC));
            do {
                int8x16_t codes[PAIRS][2];
                for (int i = 0; i < PAIRS; i++) {
                    const int64x2_t one = vreinterpretq_s64_s8(vld1q_s8(x + 2 * i * rows.stride));
                    const int64x2_t other = vreinterpretq_s64_s8(vld1q_s8(x + std::min(2 * i + 1, R - 1) * rows.stride));
                    codes[i][0] = vreinterpretq_s8_s64(vzip1q_s64(one, other)), codes[i][1] = vreinterpretq_s8_s64(vzip2q_s64(one, other));
                }
                for (int half = 0; half < 2; half++)
                    for (int p = 0; p < 8; p++, w += 16) {
                        const uint8x16_t numbers = vld1q_u8(w);
                        for (int i = 0; i < PAIRS; i++) totals[i][p] = vusmmlaq_s32(totals[i][p], numbers, codes[i][half]);
                    }
                k += 16, x += 16;
            } while (k < start + made.span);
            made.add_span(start, [&](int r) {
                Lanes total;
                for (int p = 0; p < 4; p++) {
                    const int32x4_t a = totals[r / 2][2 * p], b = totals[r / 2][2 * p + 1];
                    total.part[p] = (Vector)(r % 2 ? vuzp2q_s32(a, b) : vuzp1q_s32(a, b)) - MAGIC;
                }
                return total;
            });
        }
        made.finish(sums);
    }
};

// Products of bfloat16, in place: a register holds a pair of k for 4 rows of a panel.
struct PairsMath {
    static const int MOST = 4;
    const Matrix &matrix;
    const Rows &rows;

    const bfloat16_t *panel(int64_t index, void *) const { return (const bfloat16_t *)matrix.data + index * rows.stride * P; }
    // One sum for each result, however many rows there are.
    template <int R> void block(int64_t row, const bfloat16_t *w, Lanes *sums) const {
        const bfloat16_t *x = (const bfloat16_t *)rows.halves + row * rows.stride;
        float32x4_t made[R][4] = {};
        for (int64_t k = 0; k < rows.stride; k += 8, w += 8 * P) {
            bfloat16x8_t numbers[R];
            for (int r = 0; r < R; r++) numbers[r] = vld1q_bf16(x + r * rows.stride + k);
            unrolled<4>([&](auto lane) {
                for (int p = 0; p < 4; p++) {
                    const bfloat16x8_t weights = vld1q_bf16(w + lane * 2 * P + 8 * p);
                    for (int r = 0; r < R; r++) made[r][p] = vbfdotq_laneq_f32(made[r][p], weights, numbers[r], lane);
                }
            });
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < 4; p++) sums[r].part[p] = (Vector)made[r][p];
    }
};

template <Digits D> using Few = DotMath<D, MixedDot, StoredQuads>;

struct I8mmChoice {
    using Others = HalfChoice<Few, SquaresMath>;

    static Form form(const Matrix &matrix, int64_t rows) { return matrix.kind == OCTAVO_BF16 ? Form::BF16 : Others::form(matrix, rows); }

    template <class Run> static void choose(const Matrix &matrix, const Rows &rows, Run run) {
        if (rows.form == Form::BF16) run(PairsMath{matrix, rows});
        else Others::choose(matrix, rows, run);
    }
};

}  // namespace

void fill_i8mm(Kernels &kernels) { fill_products<I8mmChoice>(kernels); }

}  // namespace octavo
