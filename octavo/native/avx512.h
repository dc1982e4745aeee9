// Products with 512-bit registers: a register is one k, pair or quad of all 16 rows of a panel. Shared by the levels above AVX2.
#pragma once
#include <immintrin.h>

#include <initializer_list>

#include "generic.h"

namespace octavo {
namespace {

const int64_t FEW = 16;  // rows that go through codes; more are worth unpacking weights for
const int64_t MOST = 8;  // rows of one block: their sums stay in registers

// 2^t for t from -126, where floats begin to get slow, up to 127; less counts as -126. NaN stays NaN.
// To the last bit or two; ROUGH: to 3e-6 of itself.
template <bool ROUGH = false> inline __m512 power512(__m512 t) {
    t = _mm512_max_ps(_mm512_set1_ps(-126.0f), t);  // in this order
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT), rest = _mm512_sub_ps(t, whole), p;
    auto polynomial = [&](float highest, std::initializer_list<float> others) {
        p = _mm512_set1_ps(highest);
        for (float c : others) p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(c));
    };
    if (ROUGH) polynomial(0.00957010128f, {0.0559178628f, 0.240247443f, 0.693121791f, 0.999999285f});
    else polynomial(0.00132764713f, {0.00967554189f, 0.0555071309f, 0.240221202f, 0.693146944f, 1.00000012f});
    return _mm512_scalef_ps(p, whole);
}

const float LOG2_E = 1.44269504088896341f;

// x / (1 + exp(-x)), by a reciprocal made exact to the last bit or two.
inline __m512 silu512(__m512 x) {
    __m512 t = _mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)));
    __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), power512(t)), guess = _mm512_rcp14_ps(below);
    return _mm512_mul_ps(x, _mm512_mul_ps(guess, _mm512_fnmadd_ps(guess, below, _mm512_set1_ps(2.0f))));
}

// Two lists of 16 numbers of bfloat16, one behind the other, become pairs by this permutation.
inline __m512i interleave512() {
    return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
}

inline __mmask16 first_lanes(int64_t count) { return count >= P ? 0xffff : __mmask16((1 << count) - 1); }

inline __m512 bias512(const Matrix &matrix, int64_t panel) {
    if (!matrix.bias) return _mm512_setzero_ps();
    return _mm512_maskz_loadu_ps(first_lanes(matrix.n - panel * P), matrix.bias + panel * P);
}

inline void store512(__m512 values, float *y, int64_t left) { _mm512_mask_storeu_ps(y, first_lanes(left), values); }

// 16 results of a row, from column `begin` on; `left` are wanted.
inline void put512(__m512 values, const Target &target, int64_t row, int64_t begin, int64_t left) {
    int64_t place = row * target.stride + begin;
    if (target.halves) _mm256_mask_storeu_epi16(target.halves + place, first_lanes(left), (__m256i)_mm512_cvtneps_pbh(values));
    else store512(values, target.values + place, left);
}

// --- R rows of x times one panel ----------------------------------------------------------------------------------------

template <int R> void block_float(const Matrix &matrix, const Rows &rows, int64_t row, int64_t panel, __m512 *sums) {
    const float *w = (const float *)matrix.data + panel * rows.stride * P, *x = rows.values + row * rows.stride;
    __m512 acc[R];
    for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < rows.stride; k++) {
        __m512 weights = _mm512_loadu_ps(w + k * P);
        for (int r = 0; r < R; r++) acc[r] = _mm512_fmadd_ps(weights, _mm512_set1_ps(x[r * rows.stride + k]), acc[r]);
    }
    for (int r = 0; r < R; r++) sums[r] = acc[r];
}

inline __m512bh pair(const uint16_t *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

// U sums for each row, so that a step need not wait for the one before. w: a panel of bfloat16.
template <int R> void block_bf16(const uint16_t *w, const Rows &rows, int64_t row, __m512 *sums) {
    const int U = R == 1 ? 4 : R <= 3 ? 2 : 1;
    const uint16_t *x = rows.halves + row * rows.stride;
    __m512 acc[R][U];
    for (int r = 0; r < R; r++)
        for (int u = 0; u < U; u++) acc[r][u] = _mm512_setzero_ps();
    for (int64_t k = 0; k < rows.stride; k += 2 * U)
        for (int u = 0; u < U; u++) {
            __m512bh weights = (__m512bh)_mm512_loadu_si512(w + (k + 2 * u) * P);
            for (int r = 0; r < R; r++) acc[r][u] = _mm512_dpbf16_ps(acc[r][u], weights, pair(x + r * rows.stride + k + 2 * u));
        }
    for (int r = 0; r < R; r++) {
        for (int u = 1; u < U; u++) acc[r][0] = _mm512_add_ps(acc[r][0], acc[r][u]);
        sums[r] = acc[r][0];
    }
}

inline __m512i quad(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}

template <int R, bool FOUR> void block_codes(const Matrix &matrix, const Rows &rows, int64_t row, int64_t panel, __m512 *sums) {
    const int64_t groups = rows.stride / matrix.group;
    const uint8_t *w = (const uint8_t *)matrix.data + (FOUR ? panel * rows.stride * P / 2 : panel * rows.stride * P);
    const int8_t *x = rows.codes + row * rows.stride;
    const uint16_t *scale = matrix.scale + panel * groups * P, *offset = matrix.offset + panel * groups * P;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 acc[R];
    for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i total[R];
        for (int r = 0; r < R; r++) total[r] = _mm512_setzero_si512();
        for (int64_t k = g * matrix.group; k < (g + 1) * matrix.group; k += FOUR ? 8 : 4) {
            __m512i codes = _mm512_loadu_si512(w);
            w += 64;
            if (FOUR) {
                __m512i low = _mm512_and_si512(codes, nibble), high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
                for (int r = 0; r < R; r++) {
                    total[r] = _mm512_dpbusd_epi32(total[r], low, quad(x + r * rows.stride + k));
                    total[r] = _mm512_dpbusd_epi32(total[r], high, quad(x + r * rows.stride + k + 4));
                }
            } else {
                for (int r = 0; r < R; r++) total[r] = _mm512_dpbusd_epi32(total[r], codes, quad(x + r * rows.stride + k));
            }
        }
        __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scale + g * P)));
        __m512 offsets = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(offset + g * P)));
        for (int r = 0; r < R; r++) {
            int64_t place = (row + r) * groups + g;
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[r]), _mm512_mul_ps(scales, _mm512_set1_ps(rows.scale[place])), acc[r]);
            acc[r] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(rows.sum[place]), acc[r]);
        }
    }
    for (int r = 0; r < R; r++) sums[r] = _mm512_mul_ps(acc[r], _mm512_set1_ps(matrix.factor));
}

// Codes as bfloat16, for products of many rows: 32 k of a panel at a time, to [16 pairs of k][16][2].
//
// A code is shifted into the first digits behind the point of a float 1.0, which makes it 1 + code / 16 (or / 256), and scale
// and offset make that what it stands for.
template <bool FOUR> struct Unpacker {
    const Matrix &matrix;
    const int64_t stride, groups = stride / matrix.group, span = std::min<int64_t>(32, matrix.group);
    const __m512 factor = _mm512_set1_ps(matrix.factor), steps = _mm512_set1_ps(matrix.factor * (FOUR ? 16 : 256));
    const __m512i one = _mm512_set1_epi32(0x3f800000), digits = _mm512_set1_epi32(FOUR ? 0x00780000 : 0x007f8000);
    const __m512i interleave = interleave512();

    void operator()(int64_t panel, int64_t k, uint16_t *to) const {
        const uint8_t *w = (const uint8_t *)matrix.data + (panel * stride + k) * P / (FOUR ? 2 : 1);
        for (int64_t end = k + 32; k < end; k += span) {
            int64_t place = (panel * groups + k / matrix.group) * P;
            __m512 scale = _mm512_mul_ps(steps, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(matrix.scale + place))));
            __m512 offset = _mm512_fmsub_ps(factor, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(matrix.offset + place))), scale);
            auto value = [&](__m512i shifted) {  // (shifted & digits) | one
                return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(shifted, digits, one, 0xea)), scale, offset);
            };
            auto put = [&](__m512i first, __m512i second) {
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(value(second), value(first));
                _mm512_storeu_si512(to, _mm512_permutexvar_epi16(interleave, both));
                to += 32;
            };
            for (int64_t i = 0; i < span; i += FOUR ? 8 : 4, w += 64) {
                __m512i codes = _mm512_loadu_si512(w);
                if (FOUR) {
                    put(_mm512_slli_epi32(codes, 19), _mm512_slli_epi32(codes, 11));
                    put(_mm512_slli_epi32(codes, 3), _mm512_srli_epi32(codes, 5));
                }
                put(_mm512_slli_epi32(codes, 15), _mm512_slli_epi32(codes, 7));
                put(_mm512_srli_epi32(codes, 1), _mm512_srli_epi32(codes, 9));
            }
        }
    }
};

// A whole panel. to: [stride / 2][16][2]
template <bool FOUR> void unpack_panel(const Matrix &matrix, int64_t stride, int64_t panel, uint16_t *to) {
    const Unpacker<FOUR> unpack{matrix, stride};
    for (int64_t k = 0; k < stride; k += 32) unpack(panel, k, to + k * P);
}

// The panel in bfloat16: where it lies, or unpacked into scratch; null where rows are of another form.
inline const uint16_t *bf16_panel(const Matrix &matrix, const Rows &rows, int64_t panel, void *scratch) {
    if (rows.form != Form::BF16) return nullptr;
    if (matrix.kind == OCTAVO_BF16) return (const uint16_t *)matrix.data + panel * rows.stride * P;
    if (matrix.kind == OCTAVO_Q4) unpack_panel<true>(matrix, rows.stride, panel, (uint16_t *)scratch);
    else unpack_panel<false>(matrix, rows.stride, panel, (uint16_t *)scratch);
    return (const uint16_t *)scratch;
}

template <int R> void block(const Matrix &matrix, const Rows &rows, int64_t row, int64_t panel, const uint16_t *halves, __m512 *sums) {
    if (rows.form == Form::FLOAT) block_float<R>(matrix, rows, row, panel, sums);
    else if (rows.form == Form::BF16) block_bf16<R>(halves, rows, row, sums);
    else if (matrix.kind == OCTAVO_Q4) block_codes<R, true>(matrix, rows, row, panel, sums);
    else block_codes<R, false>(matrix, rows, row, panel, sums);
}

// Up to MOST rows times one panel. halves: the panel in bfloat16, if rows are.
inline void block_of(const Matrix &matrix, const Rows &rows, int64_t row, int64_t count, int64_t panel, const uint16_t *halves, __m512 *sums) {
    switch (count) {
        case 1: return block<1>(matrix, rows, row, panel, halves, sums);
        case 2: return block<2>(matrix, rows, row, panel, halves, sums);
        case 3: return block<3>(matrix, rows, row, panel, halves, sums);
        case 4: return block<4>(matrix, rows, row, panel, halves, sums);
        case 5: return block<5>(matrix, rows, row, panel, halves, sums);
        case 6: return block<6>(matrix, rows, row, panel, halves, sums);
        case 7: return block<7>(matrix, rows, row, panel, halves, sums);
        default: return block<8>(matrix, rows, row, panel, halves, sums);
    }
}

void product_avx512(const Matrix &matrix, const Rows &rows, int64_t panel, int64_t end, float *y, int64_t stride, void *scratch) {
    for (; panel < end; panel++) {
        const uint16_t *halves = bf16_panel(matrix, rows, panel, scratch);
        __m512 sums[MOST], bias = bias512(matrix, panel);
        for (int64_t row = 0; row < rows.rows; row += MOST) {
            int64_t count = std::min(MOST, rows.rows - row);
            block_of(matrix, rows, row, count, panel, halves, sums);
            for (int64_t r = 0; r < count; r++)
                store512(_mm512_add_ps(sums[r], bias), y + (row + r) * stride + panel * P, matrix.n - panel * P);
        }
    }
}

void gate_up_avx512(const Matrix &matrix, const Rows &rows, int64_t pair, int64_t end, const Target &y, void *scratch) {
    for (; pair < end; pair++) {
        const uint16_t *gate_halves = bf16_panel(matrix, rows, 2 * pair, scratch);
        const uint16_t *up_halves = bf16_panel(matrix, rows, 2 * pair + 1, (uint16_t *)scratch + rows.stride * P);
        __m512 gate[MOST], up[MOST], gate_bias = bias512(matrix, 2 * pair), up_bias = bias512(matrix, 2 * pair + 1);
        for (int64_t row = 0; row < rows.rows; row += MOST) {
            int64_t count = std::min(MOST, rows.rows - row);
            block_of(matrix, rows, row, count, 2 * pair, gate_halves, gate);
            block_of(matrix, rows, row, count, 2 * pair + 1, up_halves, up);
            for (int64_t r = 0; r < count; r++) {
                __m512 value = _mm512_mul_ps(silu512(_mm512_add_ps(gate[r], gate_bias)), _mm512_add_ps(up[r], up_bias));
                put512(value, y, row + r, pair * P, matrix.n / 2 - pair * P);
            }
        }
    }
}

Form form_avx512(const Matrix &matrix, int64_t rows) {
    if (matrix.kind == OCTAVO_F32) return Form::FLOAT;
    return matrix.kind == OCTAVO_BF16 || rows > FEW ? Form::BF16 : Form::INT8;
}

// --- rows of x ---------------------------------------------------------------------------------------------------------

void prepare_avx512(const Matrix &matrix, const float *x, const Rows &rows, int64_t row) {
    if (matrix.order || matrix.k != rows.stride || rows.form == Form::FLOAT) return prepare_generic(matrix, x, rows, row);
    if (rows.form == Form::BF16) {
        for (int64_t k = 0; k < rows.stride; k += 32)
            _mm512_storeu_si512(rows.halves + row * rows.stride + k, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + k + 16), _mm512_loadu_ps(x + k)));
        return;
    }
    int64_t groups = rows.stride / matrix.group;
    for (int64_t g = 0; g < groups; g++) {
        const float *values = x + g * matrix.group;
        int8_t *codes = rows.codes + row * rows.stride + g * matrix.group;
        __m512i largest = _mm512_setzero_si512();  // as bits, see largest_of
        for (int64_t i = 0; i < matrix.group; i += 16)
            largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(values + i))));
        float most = bits_to_float(_mm512_reduce_max_epu32(largest));
        __m512 inverse = _mm512_set1_ps(most > 0 ? 127 / most : 0.0f);
        __m512i total = _mm512_setzero_si512();
        for (int64_t i = 0; i < matrix.group; i += 16) {
            __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + i), inverse));
            total = _mm512_add_epi32(total, rounded);
            _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(rounded));
        }
        rows.scale[row * groups + g] = most / 127;
        rows.sum[row * groups + g] = most / 127 * float(_mm512_reduce_add_epi32(total));
    }
}

int64_t argmax_avx512(const float *values, int64_t count) {
    __m512 best = _mm512_set1_ps(-INFINITY);
    __m512i place = _mm512_setzero_si512(), index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512 next = _mm512_loadu_ps(values + i);
        __mmask16 above = _mm512_cmp_ps_mask(next, best, _CMP_GT_OQ);
        best = _mm512_mask_blend_ps(above, best, next);
        place = _mm512_mask_blend_epi32(above, place, index);
        index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
    }
    float most = _mm512_reduce_max_ps(best);
    __mmask16 equal = _mm512_cmp_ps_mask(best, _mm512_set1_ps(most), _CMP_EQ_OQ);
    int64_t found = most == -INFINITY ? 0 : int64_t(_mm512_mask_reduce_min_epi32(equal, place));
    for (; i < count; i++)
        if (values[i] > values[found]) found = i;
    return found;
}

}  // namespace
}  // namespace octavo
