// Philox for AVX-512: 8 counters in 64-bit lanes, the width of a product. The upper half of a lane may contain garbage:
// products read low halves only.
#pragma once
#include <immintrin.h>

#include "sampling.h"

namespace octavo {
namespace {

void philox512(const int64_t *noise, int64_t position, int64_t block, uint32_t *words) {
    const __m512i left_factor = _mm512_set1_epi64(0xD2511F53), right_factor = _mm512_set1_epi64(0xCD9E8D57);
    const __m512i steps = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), low_halves = _mm512_set1_epi64(0xffffffff);
    const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), second = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    for (int quad = 0; quad < QUADS; quad += 8, words += 8 * QUAD) {
        __m512i a = _mm512_add_epi64(_mm512_set1_epi64(block * QUADS + quad), steps), b = _mm512_set1_epi64(position);
        __m512i c = _mm512_set1_epi64(noise[2]), d = _mm512_set1_epi64(noise[3]);
        uint32_t key0 = uint32_t(noise[0]), key1 = uint32_t(noise[1]);
        for (int round = 0; round < 10; round++, key0 += 0x9E3779B9, key1 += 0xBB67AE85) {
            __m512i left = _mm512_mul_epu32(a, left_factor), right = _mm512_mul_epu32(c, right_factor);
            a = _mm512_ternarylogic_epi64(_mm512_srli_epi64(right, 32), b, _mm512_set1_epi64(key0), 0x96);  // a ^ b ^ c
            c = _mm512_ternarylogic_epi64(_mm512_srli_epi64(left, 32), d, _mm512_set1_epi64(key1), 0x96);
            b = right, d = left;
        }
        __m512i pairs = _mm512_ternarylogic_epi64(low_halves, a, _mm512_slli_epi64(b, 32), 0xea);  // (low & a) | b above it
        __m512i others = _mm512_ternarylogic_epi64(low_halves, c, _mm512_slli_epi64(d, 32), 0xea);
        _mm512_storeu_si512(words, _mm512_permutex2var_epi64(pairs, first, others));
        _mm512_storeu_si512(words + 16, _mm512_permutex2var_epi64(pairs, second, others));
    }
}

}  // namespace
}  // namespace octavo
