// Products of bfloat16 with AVX-512: a register holds a pair of k for all 16 rows of a panel. Shared by the levels avx512bf16 and amx.
#pragma once
#include "avx512.h"

namespace octavo {
namespace {

// 2^t for t from -126, where subnormals begin, to 127; smaller t count as -126. NaN stays NaN.
// Accurate to the last bit or two; ROUGH: to a relative error of 3e-6.
template <bool ROUGH = false> inline __m512 power512(__m512 t) {
    t = _mm512_max_ps(_mm512_set1_ps(-126.0f), t);  // the operand order matters for NaN
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT), rest = _mm512_sub_ps(t, whole), p;
    auto polynomial = [&](float highest, std::initializer_list<float> others) {
        p = _mm512_set1_ps(highest);
        for (float c : others) p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(c));
    };
    if (ROUGH) polynomial(0.00957010128f, {0.0559178628f, 0.240247443f, 0.693121791f, 0.999999285f});
    else polynomial(0.00132764713f, {0.00967554189f, 0.0555071309f, 0.240221202f, 0.693146944f, 1.00000012f});
    return _mm512_scalef_ps(p, whole);
}

// The permutation that interleaves two registers of 16 bfloat16 numbers.
inline __m512i interleave512() {
    return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
}

inline __mmask16 first_lanes(int64_t count) { return count >= P ? 0xffff : __mmask16((1 << count) - 1); }

inline __m512 bias512(const Matrix &matrix, int64_t panel) {
    if (!matrix.bias) return _mm512_setzero_ps();
    return _mm512_maskz_loadu_ps(first_lanes(matrix.n - panel * P), matrix.bias + panel * P);
}

inline void store512(__m512 values, float *y, int64_t left) { _mm512_mask_storeu_ps(y, first_lanes(left), values); }

// Stores 16 results of a row, from column `begin` on; only `left` of them are valid.
inline void put512(__m512 values, const Target &target, int64_t row, int64_t begin, int64_t left) {
    int64_t place = row * target.stride + begin;
    if (target.halves) _mm256_mask_storeu_epi16(target.halves + place, first_lanes(left), (__m256i)_mm512_cvtneps_pbh(values));
    else store512(values, target.values + place, left);
}

// --- R rows of x times one panel ----------------------------------------------------------------------------------------

inline __m512bh pair(const uint16_t *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

// Two sums for each row, of every other pair of k, so that a single row does not wait for each step. As many for any R: the bits of a
// row do not depend on the other rows. w: a panel of bfloat16.
template <int R> void block_bf16(const uint16_t *w, const Rows &rows, int64_t row, Lanes *sums) {
    const uint16_t *x = rows.halves + row * rows.stride;
    __m512 acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < rows.stride; k += 4)
        for (int u = 0; u < 2; u++) {
            __m512bh weights = (__m512bh)_mm512_loadu_si512(w + (k + 2 * u) * P);
            for (int r = 0; r < R; r++) acc[r][u] = _mm512_dpbf16_ps(acc[r][u], weights, pair(x + r * rows.stride + k + 2 * u));
        }
    for (int r = 0; r < R; r++) sums[r] = {{(Vector)_mm512_add_ps(acc[r][0], acc[r][1])}};
}

struct BF16Math {
    static const int MOST = 8;
    const Matrix &matrix;
    const Rows &rows;

    const uint16_t *panel(int64_t index, void *) const { return (const uint16_t *)matrix.data + index * rows.stride * P; }
    template <int R> void block(int64_t row, const uint16_t *weights, Lanes *sums) const { block_bf16<R>(weights, rows, row, sums); }
};

struct BF16Choice {
    static Form form(const Matrix &matrix, int64_t rows) { return matrix.kind == OCTAVO_BF16 ? Form::BF16 : Avx512Choice::form(matrix, rows); }

    template <class Run> static void choose(const Matrix &matrix, const Rows &rows, Run run) {
        if (rows.form == Form::BF16) run(BF16Math{matrix, rows});
        else Avx512Choice::choose(matrix, rows, run);
    }
};

}  // namespace
}  // namespace octavo
