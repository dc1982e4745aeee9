// Products with 512-bit registers: a register is one k, pair or quad of all 16 rows of a panel. Shared by the levels above AVX2.
#pragma once
#include <immintrin.h>

#include "generic.h"

namespace octavo {
namespace {

const int64_t FEW = 8;   // rows that go through codes; more are worth unpacking weights for
const int64_t MOST = 8;  // rows of one block: their sums stay in registers

inline __m512 exp512(__m512 x) {
    __m512 clamped = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.3f), x));  // in this order NaN stays NaN
    __m512 turns = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 rest = _mm512_fnmadd_ps(turns, _mm512_set1_ps(0.693359375f), clamped);
    rest = _mm512_fnmadd_ps(turns, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(rest, rest), rest), _mm512_set1_ps(1.0f));
    __mmask16 nothing = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
    return _mm512_mask_blend_ps(nothing, _mm512_scalef_ps(p, turns), _mm512_setzero_ps());
}

inline __m512 silu512(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp512(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

inline __m512 bias512(const Matrix &matrix, int64_t panel) {
    if (!matrix.bias) return _mm512_setzero_ps();
    int64_t left = matrix.n - panel * P;
    return _mm512_maskz_loadu_ps(left >= P ? 0xffff : __mmask16((1 << left) - 1), matrix.bias + panel * P);
}

inline void store512(__m512 values, float *y, int64_t left) {
    _mm512_mask_storeu_ps(y, left >= P ? 0xffff : __mmask16((1 << left) - 1), values);
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

// A panel of codes as bfloat16, for products of many rows. to: [stride / 2][16][2]
inline void unpack_panel(const Matrix &matrix, int64_t stride, int64_t panel, uint16_t *to) {
    const int64_t groups = stride / matrix.group;
    const bool four = matrix.kind == OCTAVO_Q4;
    const uint8_t *w = (const uint8_t *)matrix.data + (four ? panel * stride * P / 2 : panel * stride * P);
    const __m512i byte = _mm512_set1_epi32(255);
    // Two lists of 16 numbers, one behind the other, become pairs.
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                                18, 2, 17, 1, 16, 0);
    const __m512 factor = _mm512_set1_ps(matrix.factor);
    for (int64_t g = 0; g < groups; g++) {
        int64_t place = (panel * groups + g) * P;
        __m512 scale = _mm512_mul_ps(factor, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(matrix.scale + place))));
        __m512 offset = _mm512_mul_ps(factor, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(matrix.offset + place))));
        auto emit = [&](__m512i codes) {
            for (int i = 0; i < 2; i++) {
                __m512 first = _mm512_cvtepi32_ps(_mm512_and_si512(codes, byte));
                __m512 second = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(codes, 8), byte));
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(second, scale, offset), _mm512_fmadd_ps(first, scale, offset));
                _mm512_storeu_si512(to, _mm512_permutexvar_epi16(interleave, both));
                to += 32;
                codes = _mm512_srli_epi32(codes, 16);
            }
        };
        for (int64_t k = 0; k < matrix.group; k += four ? 8 : 4) {
            __m512i codes = _mm512_loadu_si512(w);
            w += 64;
            if (four) {
                const __m512i nibble = _mm512_set1_epi8(15);
                emit(_mm512_and_si512(codes, nibble));
                emit(_mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble));
            } else {
                emit(codes);
            }
        }
    }
}

// The panel in bfloat16: where it lies, or unpacked into scratch.
inline const uint16_t *bf16_panel(const Matrix &matrix, int64_t stride, int64_t panel, uint16_t *scratch) {
    if (matrix.kind == OCTAVO_BF16) return (const uint16_t *)matrix.data + panel * stride * P;
    unpack_panel(matrix, stride, panel, scratch);
    return scratch;
}

template <int R> void block(const Matrix &matrix, const Rows &rows, int64_t row, int64_t panel, const uint16_t *halves, __m512 *sums) {
    if (rows.form == Form::FLOAT) block_float<R>(matrix, rows, row, panel, sums);
    else if (rows.form == Form::BF16) block_bf16<R>(halves, rows, row, sums);
    else if (matrix.kind == OCTAVO_Q4) block_codes<R, true>(matrix, rows, row, panel, sums);
    else block_codes<R, false>(matrix, rows, row, panel, sums);
}

// All rows times one panel, a block at a time: take(row, count, sums) gets up to MOST results.
template <class Take> void by_blocks(const Matrix &matrix, const Rows &rows, int64_t panel, uint16_t *scratch, Take take) {
    const uint16_t *halves = rows.form == Form::BF16 ? bf16_panel(matrix, rows.stride, panel, scratch) : nullptr;
    for (int64_t row = 0; row < rows.rows; row += MOST) {
        __m512 sums[MOST];
        int64_t count = std::min(MOST, rows.rows - row);
        switch (count) {
            case 1: block<1>(matrix, rows, row, panel, halves, sums); break;
            case 2: block<2>(matrix, rows, row, panel, halves, sums); break;
            case 3: block<3>(matrix, rows, row, panel, halves, sums); break;
            case 4: block<4>(matrix, rows, row, panel, halves, sums); break;
            case 5: block<5>(matrix, rows, row, panel, halves, sums); break;
            case 6: block<6>(matrix, rows, row, panel, halves, sums); break;
            case 7: block<7>(matrix, rows, row, panel, halves, sums); break;
            default: block<8>(matrix, rows, row, panel, halves, sums);
        }
        take(row, count, sums);
    }
}

void product_avx512(const Matrix &matrix, const Rows &rows, int64_t panel, int64_t end, float *y, int64_t stride, void *scratch) {
    for (; panel < end; panel++) {
        __m512 bias = bias512(matrix, panel);
        by_blocks(matrix, rows, panel, (uint16_t *)scratch, [&](int64_t row, int64_t count, __m512 *sums) {
            for (int64_t r = 0; r < count; r++)
                store512(_mm512_add_ps(sums[r], bias), y + (row + r) * stride + panel * P, matrix.n - panel * P);
        });
    }
}

void gate_up_avx512(const Matrix &matrix, const Rows &rows, int64_t pair, int64_t end, float *y, int64_t stride, void *scratch) {
    for (; pair < end; pair++) {
        __m512 gate_bias = bias512(matrix, 2 * pair), up_bias = bias512(matrix, 2 * pair + 1);
        float *place = y + pair * P;
        int64_t left = matrix.n / 2 - pair * P;
        by_blocks(matrix, rows, 2 * pair, (uint16_t *)scratch, [&](int64_t row, int64_t count, __m512 *sums) {
            for (int64_t r = 0; r < count; r++) store512(silu512(_mm512_add_ps(sums[r], gate_bias)), place + (row + r) * stride, left);
        });
        by_blocks(matrix, rows, 2 * pair + 1, (uint16_t *)scratch, [&](int64_t row, int64_t count, __m512 *sums) {
            __mmask16 kept = left >= P ? 0xffff : __mmask16((1 << left) - 1);
            for (int64_t r = 0; r < count; r++) {
                float *to = place + (row + r) * stride;
                _mm512_mask_storeu_ps(to, kept, _mm512_mul_ps(_mm512_maskz_loadu_ps(kept, to), _mm512_add_ps(sums[r], up_bias)));
            }
        });
    }
}

Form form_avx512(const Matrix &matrix, int64_t rows) {
    if (matrix.kind == OCTAVO_F32) return Form::FLOAT;
    return matrix.kind == OCTAVO_BF16 || rows > FEW ? Form::BF16 : Form::INT8;
}

// --- rows of x ---------------------------------------------------------------------------------------------------------

void prepare_avx512(const Matrix &matrix, const float *x, int64_t size, int64_t begin, int64_t end, Rows &rows) {
    if (matrix.order || size != rows.stride || rows.form == Form::FLOAT) return prepare_generic(matrix, x, size, begin, end, rows);
    for (int64_t row = begin; row < end; row++) {
        const float *from = x + row * size;
        if (rows.form == Form::BF16) {
            for (int64_t k = 0; k < size; k += 32)
                _mm512_storeu_si512(rows.halves + row * rows.stride + k,
                                    (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + k + 16), _mm512_loadu_ps(from + k)));
            continue;
        }
        int64_t groups = rows.stride / matrix.group;
        for (int64_t g = 0; g < groups; g++) {
            const float *values = from + g * matrix.group;
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
