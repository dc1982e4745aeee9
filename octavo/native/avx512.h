// Products of codes with AVX-512 VNNI: a register holds a quad of codes for all 16 rows of a panel.
#pragma once
#include "generic.h"

namespace octavo {
namespace {

inline __m512i quad(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}

template <Digits D> struct VnniMath {
    static const bool FOUR = D != Digits::BYTES;
    static const int MOST = 8;
    const Matrix &matrix;
    const Rows &rows;

    int64_t panel(int64_t index, void *) const { return index; }
    template <int R> void block(int64_t row, int64_t panel, Lanes *sums) const {
        CodeSums<R> made(matrix, rows, row, panel);
        const uint8_t *w = (const uint8_t *)matrix.data + panel * rows.stride * P / (FOUR ? 2 : 1);
        const int8_t *x = rows.codes + row * rows.stride;
        const __m512i nibble = _mm512_set1_epi8(15);
        __m512i table = _mm512_setzero_si512();
        if (D == Digits::LOOKED_UP) table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)matrix.table));
        for (int64_t k = 0; k < rows.stride;) {
            const int64_t start = k;
            __m512i total[R];
            for (int r = 0; r < R; r++) total[r] = _mm512_setzero_si512();
            for (const int64_t end = k + made.span; k < end; k += FOUR ? 8 : 4, w += 64) {
                __m512i codes = _mm512_loadu_si512(w);
                if (FOUR) {
                    __m512i low = _mm512_and_si512(codes, nibble), high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
                    if (D == Digits::LOOKED_UP) low = _mm512_shuffle_epi8(table, low), high = _mm512_shuffle_epi8(table, high);
                    for (int r = 0; r < R; r++) {
                        total[r] = _mm512_dpbusd_epi32(total[r], low, quad(x + r * rows.stride + k));
                        total[r] = _mm512_dpbusd_epi32(total[r], high, quad(x + r * rows.stride + k + 4));
                    }
                } else {
                    for (int r = 0; r < R; r++) total[r] = _mm512_dpbusd_epi32(total[r], codes, quad(x + r * rows.stride + k));
                }
            }
            made.add_span(start, [&](int r) { return Lanes{{(Vector)_mm512_cvtepi32_ps(total[r])}}; });
        }
        made.finish(sums);
    }
};

using Avx512Choice = FloatChoice<VnniMath>;

// quantize_span for 16 columns at a time.
inline void quantize_span512(const float *values, int64_t count, int8_t *codes, float &scale, float &sum) {
    __m512i bits = _mm512_setzero_si512(), total = bits;
    for (int64_t i = 0; i < count; i += 16)
        bits = _mm512_max_epu32(bits, _mm512_and_si512(_mm512_loadu_si512(values + i), _mm512_set1_epi32(0x7fffffff)));
    const float largest = bits_to_float(_mm512_reduce_max_epu32(bits)), inverse = largest > 0 ? 127 / largest : 0.0f;
    const __mmask16 finite = float_to_bits(largest) < 0x7f800000 ? 0xffff : 0;
    scale = largest / 127;
    for (int64_t i = 0; i < count; i += 16) {
        const __m512i four = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(inverse)));
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(four));
        total = _mm512_add_epi32(total, four);
    }
    sum = scale * float(_mm512_reduce_add_epi32(total));
}

}  // namespace
}  // namespace octavo
