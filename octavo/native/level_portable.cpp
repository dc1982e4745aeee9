// The level that every machine has: the generic kernels, compiled for the baseline CPU of the architecture.
//
// Codes are multiplied as 16-bit numbers, two neighbours of k at a time, which every such CPU can do in one or two instructions.
#include "generic.h"

namespace octavo {
namespace {

// total + the products of both numbers of each pair
#if defined(__x86_64__)
inline Integers add_products(Integers total, Integers weights, Integers x) { return total + (Integers)_mm_madd_epi16((__m128i)weights, (__m128i)x); }
#else
inline Integers add_products(Integers total, Integers weights, Integers x) { return total + (weights & 0xffff) * (x << 16 >> 16) + (weights >> 16) * (x >> 16); }
#endif

struct PairedPanel {
    const int32_t *codes;           // [k / 2][16]: two codes of 16 bits
    const float *scale, *offset;    // [groups][16]
};

template <Digits D> struct PairedCodesMath {
    static const int MOST = 2;
    static const bool FOUR = D != Digits::BYTES;
    const Matrix &matrix;
    const Rows &rows;

    // Unpacked once for all rows, into less memory than floats.
    PairedPanel panel(int64_t index, void *memory) const {
        const int64_t groups = rows.stride / matrix.group;
        int32_t *codes = (int32_t *)memory;
        float *scale = (float *)(codes + rows.stride / 2 * P), *offset = scale + groups * P;
        const uint8_t *w = (const uint8_t *)matrix.data + index * rows.stride * P / (FOUR ? 2 : 1);
        int32_t *to = codes;
        for (int64_t k = 0; k < rows.stride; k += FOUR ? 8 : 4, w += 64)
            each_quad<D>(load_words(w), matrix.table, [&](const Words &quads, int shift, int mask) {
                for (int i = 0; i < 16; i += 8, to += P)
                    for (int p = 0; p < PARTS; p++) {
                        const Integers word = quads.part[p] >> (shift + 2 * i);
                        const Integers both = (word & mask) | ((word >> 8) & mask) << 16;
                        memcpy(to + p * WIDTH, &both, sizeof both);
                    }
            });
        for (int64_t i = 0; i < groups * P; i += P) {
            store(load_f16(matrix.scale + index * groups * P + i), scale + i);
            store(load_f16(matrix.offset + index * groups * P + i), offset + i);
        }
        return {codes, scale, offset};
    }

    template <int R> void block(int64_t row, const PairedPanel &panel, Lanes *sums) const {
        CodeSums<R> made(matrix, rows, row, 0);
        const int8_t *x = rows.codes + row * rows.stride;
        const int32_t *w = panel.codes;
        for (int64_t k = 0; k < rows.stride;) {
            const int64_t start = k, group = (k >> made.group_bits) * P;
            Integers total[R][PARTS] = {};
            for (const int64_t end = k + made.span; k < end; k += 2, w += P) {
                Integers both[R];
                for (int r = 0; r < R; r++) both[r] = pair(x + r * rows.stride + k) - Integers{};
                for (int p = 0; p < PARTS; p++) {
                    Integers weights;
                    memcpy(&weights, w + p * WIDTH, sizeof weights);
                    for (int r = 0; r < R; r++) total[r][p] = add_products(total[r][p], weights, both[r]);
                }
            }
            made.add_span(start, load(panel.scale + group), load(panel.offset + group), [&](int r) {
                Lanes floats;
                for (int p = 0; p < PARTS; p++) floats.part[p] = __builtin_convertvector(total[r][p], Vector);
                return floats;
            });
        }
        made.finish(sums);
    }

private:
    static int32_t pair(const int8_t *x) { return int32_t(uint32_t(uint16_t(x[0])) | uint32_t(uint16_t(x[1])) << 16); }
};

}  // namespace

void fill_portable(Kernels &kernels) {
    kernels = {};
    fill_generic(kernels);
    fill_products<FloatChoice<PairedCodesMath>>(kernels);
}

}  // namespace octavo
