// AVX2 with FMA and conversions from float16: products of codes by hand, the rest compiled for 8 lanes.
//
// The instruction that multiplies bytes adds two neighbours in 16 bits, which would overflow with 8-bit codes. So one factor must be
// small: 4-bit codes are; with 8-bit codes or a table, weights are shifted to -128..127, and their sign is moved to x.
#include "generic.h"

namespace octavo {
namespace {

inline __m256i quad(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

template <Digits D> struct Avx2Math {
    static const bool FOUR = D != Digits::BYTES, SMALL = D == Digits::NIBBLES;
    static const int MOST = SMALL ? 4 : 3;
    const Matrix &matrix;
    const Rows &rows;

    int64_t panel(int64_t index, void *) const { return index; }
    template <int R> void block(int64_t row, int64_t panel, Lanes *sums) const {
        CodeSums<R, !SMALL> made(matrix, rows, row, panel);
        const uint8_t *w = (const uint8_t *)matrix.data + panel * rows.stride * P / (FOUR ? 2 : 1);
        const int8_t *x = rows.codes + row * rows.stride;
        const __m256i nibble = _mm256_set1_epi8(15), middle = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
        __m256i table = _mm256_setzero_si256();
        if (D == Digits::LOOKED_UP) table = _mm256_xor_si256(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)matrix.table)), middle);
        for (int64_t k = 0; k < rows.stride;) {
            const int64_t start = k;
            __m256i total[R][2] = {};
            auto add = [&](int r, int half, __m256i codes, __m256i four) {
                __m256i pairs = SMALL ? _mm256_maddubs_epi16(codes, four) : _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(four, codes));
                total[r][half] = _mm256_add_epi32(total[r][half], _mm256_madd_epi16(pairs, ones));
            };
            for (const int64_t end = k + made.span; k < end; k += FOUR ? 8 : 4, w += 64)
                for (int half = 0; half < 2; half++) {
                    const __m256i codes = _mm256_loadu_si256((const __m256i *)(w + 32 * half));
                    __m256i low = _mm256_and_si256(codes, nibble), high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
                    if (D == Digits::LOOKED_UP) low = _mm256_shuffle_epi8(table, low), high = _mm256_shuffle_epi8(table, high);
                    for (int r = 0; r < R; r++) {
                        const int8_t *at = x + r * rows.stride + k;
                        if (FOUR) {
                            add(r, half, low, quad(at));
                            add(r, half, high, quad(at + 4));
                        } else {
                            add(r, half, _mm256_xor_si256(codes, middle), quad(at));
                        }
                    }
                }
            made.add_span(start, [&](int r) { return Lanes{{(Vector)_mm256_cvtepi32_ps(total[r][0]), (Vector)_mm256_cvtepi32_ps(total[r][1])}}; });
        }
        made.finish(sums);
    }
};

}  // namespace

void fill_avx2(Kernels &kernels) {
    fill_generic(kernels);
    fill_products<FloatChoice<Avx2Math>>(kernels);
}

}  // namespace octavo
