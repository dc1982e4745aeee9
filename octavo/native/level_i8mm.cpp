// ARM with products of unsigned by signed bytes, and of bfloat16: small batches as codes, large batches in bfloat16.
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

// Unpacks a panel of codes to pairs of bfloat16: to [stride / 2][16][2]
template <Digits D> void unpack_pairs(const Matrix &matrix, int64_t stride, int64_t panel, bfloat16_t *to) {
    const bool FOUR = D != Digits::BYTES;
    const int64_t groups = stride / matrix.group;
    const uint8_t *w = (const uint8_t *)matrix.data + panel * stride * P / (FOUR ? 2 : 1);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t place = (panel * groups + g) * P;
        const Lanes scale = load_f16(matrix.scale + place) * matrix.factor, offset = load_f16(matrix.offset + place) * matrix.factor;
        auto put = [&](const Words &words, int shift, int mask) {  // the bits from `shift` on, of this and of the next byte
            const Lanes first = multiply_add(digits_of(words, shift, mask), scale, offset);
            const Lanes second = multiply_add(digits_of(words, shift + 8, mask), scale, offset);
            for (int p = 0; p < 4; p++, to += 8) {
                const bfloat16x8_t both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first.part[p]), (float32x4_t)second.part[p]);
                const uint16x8_t bits = vreinterpretq_u16_bf16(both);
                vst1q_bf16(to, vreinterpretq_bf16_u16(vzip1q_u16(bits, vextq_u16(bits, bits, 4))));
            }
        };
        for (int64_t k = 0; k < matrix.group; k += FOUR ? 8 : 4, w += 64) {
            each_quad<D>(load_words(w), matrix.table, [&](const Words &words, int shift, int mask) {
                put(words, shift, mask), put(words, shift + 16, mask);
            });
        }
    }
}

// Products of bfloat16: a register holds a pair of k for 4 rows of a panel.
struct PairsMath {
    static const int MOST = 4;
    const Matrix &matrix;
    const Rows &rows;

    // In place, or unpacked.
    const bfloat16_t *panel(int64_t index, void *memory) const {
        if (matrix.kind == OCTAVO_BF16) return (const bfloat16_t *)matrix.data + index * rows.stride * P;
        by_digits(matrix, [&](auto digits) { unpack_pairs<digits>(matrix, rows.stride, index, (bfloat16_t *)memory); });
        return (const bfloat16_t *)memory;
    }
    template <int R> void block(int64_t row, const bfloat16_t *w, Lanes *sums) const {
        const bfloat16_t *x = (const bfloat16_t *)rows.halves + row * rows.stride;
        const int U = R == 1 ? 2 : 1;  // sums of each row, so that a step does not wait for the previous one
        float32x4_t made[R][U][4] = {};
        for (int64_t k = 0; k < rows.stride; k += 8, w += 8 * P) {
            bfloat16x8_t numbers[R];
            for (int r = 0; r < R; r++) numbers[r] = vld1q_bf16(x + r * rows.stride + k);
            unrolled<4>([&](auto lane) {
                for (int p = 0; p < 4; p++) {
                    const bfloat16x8_t weights = vld1q_bf16(w + lane * 2 * P + 8 * p);
                    for (int r = 0; r < R; r++) made[r][lane % U][p] = vbfdotq_laneq_f32(made[r][lane % U][p], weights, numbers[r], lane);
                }
            });
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < 4; p++) sums[r].part[p] = (Vector)(U == 1 ? made[r][0][p] : vaddq_f32(made[r][0][p], made[r][U - 1][p]));
    }
};

struct I8mmChoice {
    static Form form(const Matrix &matrix, int64_t rows) {
        return matrix.kind == OCTAVO_BF16 || (has_codes(matrix) && rows > FEW) ? Form::BF16 : HalfChoice<MixedDot>::form(matrix, rows);
    }

    template <class Run> static void choose(const Matrix &matrix, const Rows &rows, Run run) {
        if (rows.form == Form::BF16) run(PairsMath{matrix, rows});
        else HalfChoice<MixedDot>::choose(matrix, rows, run);
    }
};

}  // namespace

void fill_i8mm(Kernels &kernels) { fill_products<I8mmChoice>(kernels); }

}  // namespace octavo
