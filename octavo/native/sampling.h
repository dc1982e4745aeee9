// Samples a token of a row and ranks its best, by the rules of octavo/kernels/reference/sampling.py, but without sorting.
//
// A row is stored as the distances of its tokens from the best, d = (max - logit) / temperature, in blocks of 128, and the minimum of
// each block. None is negative, so their bits have the same order as the numbers: the order (d, id) is one of integers.
//
//     a filter   finds its cutoff in that order, from sums over bit fields: 11, then 10, then 10 more bits; tokens beyond it are removed
//     the draw   is a race for the highest noise - d. An upper bound of the noise needs no logarithm, so logarithms are computed
//                only for the few tokens that could still win; they are exact, and the same on every level
//
// Blocks whose minimum is beyond a cutoff, or too far behind in the race, are skipped. Included by generic.h, for each level.
#pragma once
#include <algorithm>
#include <cmath>

#include "levels.h"
#include "scalar.h"

namespace octavo {
namespace {

const int QUAD = 4, QUADS = ROW_BLOCK / QUAD;         // tokens of a counter, counters of a block
const uint32_t LARGEST = 0x7fffffff, INFINITE = 0x7f800000;
const uint32_t OUT = 0x80000000;                      // the minimum of a block without tokens: more than any bits
const float MOST_NOISE = 16.7f;                       // -log(-log(1 - 2^-24)) = 16.64

// --- noise -------------------------------------------------------------------------------------------------------------

// Philox4x32-10 for the tokens of a block. noise: key, key, stream, high; words: [ROW_BLOCK]
inline void philox(const int64_t *noise, int64_t position, int64_t block, uint32_t *words) {
    uint32_t a[QUADS], b[QUADS], c[QUADS], d[QUADS], key0 = uint32_t(noise[0]), key1 = uint32_t(noise[1]);
    for (int n = 0; n < QUADS; n++) {
        a[n] = uint32_t(block * QUADS + n), b[n] = uint32_t(position);
        c[n] = uint32_t(noise[2]), d[n] = uint32_t(noise[3]);
    }
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9, key1 += 0xBB67AE85)
        for (int n = 0; n < QUADS; n++) {
            uint64_t left = uint64_t(a[n]) * 0xD2511F53, right = uint64_t(c[n]) * 0xCD9E8D57;
            a[n] = uint32_t(right >> 32) ^ b[n] ^ key0, b[n] = uint32_t(right);
            c[n] = uint32_t(left >> 32) ^ d[n] ^ key1, d[n] = uint32_t(left);
        }
    for (int n = 0; n < QUADS; n++) {
        words[n * QUAD] = a[n], words[n * QUAD + 1] = b[n];
        words[n * QUAD + 2] = c[n], words[n * QUAD + 3] = d[n];
    }
}

inline float unit(uint32_t word) { return (float(int32_t(word >> 9)) + 0.5f) * 0x1p-23f; }  // inside (0, 1), exact

// Each logarithm is rounded to a float, as in the reference.
inline float gumbel(float unit) { return -float(std::log(double(-float(std::log(double(unit)))))); }

// An upper bound of the Gumbel noise of a word, at most 0.1 too large if that is above 3: -log(-log(u)) <= -log(1 - u), and the bits
// of 1 - u, read as a number, approximate its logarithm from below.
inline float noise_bound(uint32_t word) {
    float rest = float(int32_t(~word >> 9)) + 0.5f;  // (1 - u) * 2^23
    return 0.693148f * (150.0001f - float(int32_t(float_to_bits(rest))) * 0x1p-23f);
}

using Philox = void (*)(const int64_t *noise, int64_t position, int64_t block, uint32_t *words);

template <Philox PHILOX> void uniform_row(const int64_t *noise, int64_t position, float *numbers, int64_t count) {
    uint32_t words[ROW_BLOCK];
    for (int64_t begin = 0; begin < count; begin += ROW_BLOCK) {
        PHILOX(noise, position, begin / ROW_BLOCK, words);
        for (int64_t i = begin; i < std::min<int64_t>(count, begin + ROW_BLOCK); i++) numbers[i] = unit(words[i - begin]);
    }
}

// --- rows --------------------------------------------------------------------------------------------------------------

struct Row {
    int64_t blocks;
    uint32_t *bits;    // [blocks][ROW_BLOCK]: of the distances; LARGEST after the last token
    uint32_t *least;   // [blocks]: the minimum of each, or OUT
    uint32_t *spare;   // [blocks][ROW_BLOCK]

    // Calls look(begin) for the blocks, by their first token, whose minimum is at most `high`.
    template <class Look> void each_block(uint32_t high, Look look) const {
        for (int64_t block = 0; block < blocks; block++)
            if (least[block] <= high) look(block * ROW_BLOCK);
    }
};

inline float largest_logit(const float *logits, int64_t vocab) {
    float lanes[ROW_BLOCK];
    std::fill(lanes, lanes + ROW_BLOCK, -INFINITY);
    int64_t i = 0;
    for (; i + ROW_BLOCK <= vocab; i += ROW_BLOCK)
        for (int n = 0; n < ROW_BLOCK; n++) lanes[n] = logits[i + n] > lanes[n] ? logits[i + n] : lanes[n];
    for (; i < vocab; i++) lanes[0] = logits[i] > lanes[0] ? logits[i] : lanes[0];
    return *std::max_element(lanes, lanes + ROW_BLOCK);
}

// memory: row_words(vocab)
Row measure(const float *logits, int64_t vocab, float temperature, uint32_t *memory) {
    int64_t blocks = row_blocks(vocab);
    Row row{blocks, memory, memory + blocks * ROW_BLOCK, memory + blocks * (ROW_BLOCK + 1)};
    float most = largest_logit(logits, vocab), scale = std::min(std::max(temperature, 0x1p-126f), 0x1.fffffep127f);
    for (int64_t i = 0; i < vocab; i++) row.bits[i] = float_to_bits((most - logits[i]) / scale) & LARGEST;  // removes the sign of -0
    std::fill(row.bits + vocab, row.least, LARGEST);
    for (int64_t block = 0; block < blocks; block++) {
        uint32_t least = LARGEST;
        for (int n = 0; n < ROW_BLOCK; n++) least = std::min(least, row.bits[block * ROW_BLOCK + n]);
        row.least[block] = least;
    }
    return row;
}

// --- cutoffs -----------------------------------------------------------------------------------------------------------

const float NO_MASS = 28;  // exp(-28) * 2^40 < 1

// exp(-distance) in fixed point, 2^40 for the best token: sums do not depend on their order. Computed as two halves of 20 bits,
// since vectors of floats convert to 32 bits.
inline int64_t mass(uint32_t bits) {
    float distance = bits_to_float(bits), scaled = fast_exp(-(distance < NO_MASS ? distance : NO_MASS)) * 0x1p20f;
    int32_t high = int32_t(scaled), low = int32_t((scaled - float(high)) * 0x1p20f);
    return (int64_t(high) << 20) + low;
}

int64_t total_mass(const Row &row) {
    int64_t total = 0;
    row.each_block(float_to_bits(NO_MASS), [&](int64_t begin) {
        for (int n = 0; n < ROW_BLOCK; n++) total += mass(row.bits[begin + n]);
    });
    return total;
}

struct Cut {           // kept: tokens with fewer bits, and the first `equals` with the same bits
    uint32_t bits;
    int64_t equals;
};

// Copies the elements of `from` between low and high to `to`, which may be the same array; returns their end.
inline uint32_t *pick(const uint32_t *from, int64_t count, uint32_t low, uint32_t high, uint32_t *to) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = from[i];
        *to = bits;
        to += bits - low <= high - low;
    }
    return to;
}

// Keeps tokens with a total weight of less than `goal` before them. All kept tokens have at most the bits `high`.
template <class Weigh> Cut cut_at(const Row &row, double goal, uint32_t high, Weigh weigh) {
    uint32_t low = 0, *end = row.spare;
    row.each_block(high, [&](int64_t begin) { end = pick(row.bits + begin, ROW_BLOCK, low, high, end); });
    int64_t before = 0;
    for (int shift : {20, 10, 0}) {
        int64_t sums[2048] = {}, weights[ROW_BLOCK];
        for (const uint32_t *from = row.spare; from < end; from += ROW_BLOCK) {
            int64_t count = std::min<int64_t>(ROW_BLOCK, end - from);
            for (int64_t n = 0; n < count; n++) weights[n] = weigh(from[n]);
            for (int64_t n = 0; n < count; n++) sums[(from[n] - low) >> shift] += weights[n];
        }
        uint32_t slot = 0, last = (high - low) >> shift;
        for (; slot < last && double(before + sums[slot]) < goal; slot++) before += sums[slot];
        low += slot << shift;
        high = std::min(high, low + (1u << shift) - 1);
        end = pick(row.spare, end - row.spare, low, high, row.spare);
    }
    double each = double(weigh(low));
    return {low, each > 0 ? int64_t(std::ceil((goal - double(before)) / each)) : INT64_MAX};
}

// Keeps the first `count` tokens. That many blocks have a minimum up to the count-th smallest, so no more are needed.
Cut cut_count(const Row &row, int64_t count) {
    uint32_t high = LARGEST;
    if (count < row.blocks) {
        std::copy(row.least, row.least + row.blocks, row.spare);
        std::nth_element(row.spare, row.spare + count - 1, row.spare + row.blocks);
        high = std::min(high, row.spare[count - 1]);
    }
    return cut_at(row, double(count), high, [](uint32_t) { return int64_t(1); });
}

// Keeps tokens with less than `part` of the probability before them. Tokens so far out that all together weigh less than the rest are
// skipped.
Cut cut_mass(const Row &row, double part) {
    double total = double(total_mass(row)), rest = (1 - part) * total * 0x1p-40;
    double reach = std::log(double(row.blocks * ROW_BLOCK) / rest) + 0.01;
    uint32_t high = float_to_bits(float(std::clamp(reach, 0.0, double(NO_MASS))));
    return cut_at(row, std::max(part * total, 0.5), high, [](uint32_t bits) { return mass(bits); });
}

// Keeps tokens with at least `part` of the best one's probability. The cutoff is found by bisection, with an exact exponential.
Cut cut_least(double part) {
    int64_t floor = int64_t(part * 0x1p40);
    uint32_t within = 0, beyond = INFINITE + 1;
    while (beyond - within > 1) {
        uint32_t middle = within + (beyond - within) / 2;
        bool passes = int64_t(float(std::exp(-double(bits_to_float(middle)))) * 0x1p40f) >= floor;
        (passes ? within : beyond) = middle;
    }
    return {within, INT64_MAX};
}

void drop_beyond(Row &row, Cut cut) {
    for (int64_t block = 0; block < row.blocks; block++) {
        uint32_t *bits = row.bits + block * ROW_BLOCK;
        if (row.least[block] > cut.bits) row.least[block] = OUT;
        if (row.least[block] == OUT) continue;
        int equal = 0;
        for (int n = 0; n < ROW_BLOCK; n++) {
            equal += bits[n] == cut.bits;
            bits[n] = bits[n] > cut.bits ? INFINITE : bits[n];
        }
        for (int n = ROW_BLOCK - 1; equal > cut.equals; n--)  // the higher ids of equals
            if (bits[n] == cut.bits) bits[n] = INFINITE, equal--;
        cut.equals -= equal;
    }
}

// --- sampling and ranking ----------------------------------------------------------------------------------------------

// The highest noise - distance, the lower id in a tie. It starts from the best token, which is hard to beat.
template <Philox PHILOX> int64_t race(const Row &row, const int64_t *noise, int64_t position) {
    int64_t winner = 0;
    float score = -INFINITY, bound[ROW_BLOCK];
    uint32_t words[ROW_BLOCK];
    auto run = [&](int64_t token) {
        float mine = gumbel(unit(words[token % ROW_BLOCK])) - bits_to_float(row.bits[token]);
        if (mine > score || (mine == score && token < winner)) score = mine, winner = token;
    };
    int64_t first = std::find(row.bits, row.least, 0u) - row.bits;
    if (first < row.blocks * ROW_BLOCK) {
        PHILOX(noise, position, first / ROW_BLOCK, words);
        run(first);
    }
    for (int64_t block = 0; block < row.blocks; block++) {
        if (row.least[block] == OUT || MOST_NOISE - bits_to_float(row.least[block]) < score) continue;
        PHILOX(noise, position, block, words);
        int any = 0;
        for (int n = 0; n < ROW_BLOCK; n++) {
            bound[n] = noise_bound(words[n]) - bits_to_float(row.bits[block * ROW_BLOCK + n]);
            any |= bound[n] >= score;
        }
        for (int n = 0; any && n < ROW_BLOCK; n++)
            if (bound[n] >= score) run(block * ROW_BLOCK + n);
    }
    return winner;
}

template <Philox PHILOX> void draw_row(const Draws &draws, int64_t index, uint32_t *memory) {
    Row row = measure(draws.logits + index * draws.vocab, draws.vocab, draws.temperature[index], memory);
    if (draws.min_p[index] > 0) drop_beyond(row, cut_least(draws.min_p[index]));
    if (draws.top_k[index] > 0 && draws.top_k[index] < draws.vocab) drop_beyond(row, cut_count(row, draws.top_k[index]));
    if (draws.top_p[index] < 1) drop_beyond(row, cut_mass(row, draws.top_p[index]));
    draws.ids[index] = race<PHILOX>(row, draws.noise + index * 4, draws.positions[index]);
}

void rank_generic(const Ranking &ranking, int64_t index, uint32_t *memory) {
    Row row = measure(ranking.logits + index * ranking.vocab, ranking.vocab, 1.0f, memory);
    float chosen = bits_to_float(row.bits[ranking.ids[index]]);
    int64_t nearer = 0;
    row.each_block(float_to_bits(chosen), [&](int64_t begin) {
        for (int n = 0; n < ROW_BLOCK; n++) nearer += bits_to_float(row.bits[begin + n]) < chosen;
    });
    ranking.chosen[index] = chosen;
    ranking.ranks[index] = nearer + 1;
    ranking.totals[index] = total_mass(row);
    if (ranking.count == 0) return;
    Cut cut = cut_count(row, ranking.count);
    int64_t *keys = ranking.near_ids + index * ranking.count, *end = keys;  // bits above, the id below: all are different
    row.each_block(cut.bits, [&](int64_t begin) {
        for (int64_t i = begin; i < begin + ROW_BLOCK; i++)
            if (row.bits[i] < cut.bits || (row.bits[i] == cut.bits && cut.equals-- > 0)) *end++ = int64_t(row.bits[i]) << 32 | i;
    });
    std::sort(keys, end);
    for (int64_t i = 0; i < ranking.count; i++) {
        ranking.near[index * ranking.count + i] = bits_to_float(uint32_t(keys[i] >> 32));
        keys[i] &= 0xffffffff;
    }
}

}  // namespace
}  // namespace octavo
