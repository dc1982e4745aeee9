// Attention of many queries with tiles. 16 queries meet 64 keys at a time:
//
//     scores [16 x 64] = queries [16 x dim] * keys^T         B tiles: keys turned round, pairs of dimensions side by side
//     weights [16 x 64] by online softmax, in bfloat16
//     sums [16 x dim] += weights [16 x 64] * values          B tiles: values as they are, pairs of keys side by side
//
// Keys and values of a tile are brought into these shapes once for all queries of the task.
#pragma once
#include "attention512.h"

namespace octavo {
namespace {

const int64_t AT_LEAST_QUERIES = 16;

// Rows become columns: 16 x 16 numbers of 32 bits.
inline void transpose16(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

const int64_t B_TILE = 16 * 32;  // numbers of bfloat16 in one

// [4 tiles of 16 keys][dim / 32][16 pairs of dimensions][16 keys][2]
inline void pack_keys(const Tile &tile, int64_t dim, uint16_t *to) {
    for (int64_t j = 0; j < 4; j++)
        for (int64_t d = 0; d < dim; d += 32, to += B_TILE) {
            __m512i rows[16];
            for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(tile.keys[16 * j + i] + d);
            transpose16(rows);
            for (int i = 0; i < 16; i++) _mm512_store_si512(to + 32 * i, rows[i]);
        }
}

// [dim / 16][2 halves of the keys][16 pairs of keys][16 dimensions][2]
inline void pack_values(const Tile &tile, int64_t dim, uint16_t *to) {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 16; i++) {
        low[2 * i] = uint16_t(i), low[2 * i + 1] = uint16_t(32 + i);
        high[2 * i] = uint16_t(16 + i), high[2 * i + 1] = uint16_t(48 + i);
    }
    const __m512i first = _mm512_load_si512(low), second = _mm512_load_si512(high);
    for (int64_t d = 0; d < dim; d += 32)
        for (int64_t p = 0; p < KEYS / 2; p++) {
            __m512i a = _mm512_loadu_si512(tile.values[2 * p] + d), b = _mm512_loadu_si512(tile.values[2 * p + 1] + d);
            uint16_t *place = to + (d / 16 * 2 + p / 16) * B_TILE + p % 16 * 32;
            _mm512_store_si512(place, _mm512_permutex2var_epi16(a, first, b));
            _mm512_store_si512(place + 2 * B_TILE, _mm512_permutex2var_epi16(a, second, b));
        }
}

// Scores of 16 queries against 64 keys. scores: [16][64]
inline void score_tiles(const uint16_t *q, const uint16_t *keys, int64_t dim, float *scores) {
    const int64_t steps = dim / 32;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(4, q + 32 * s, dim * 2);
        _tile_loadd(5, keys + s * B_TILE, 64);
        _tile_loadd(6, keys + (steps + s) * B_TILE, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, keys + (2 * steps + s) * B_TILE, 64);
        _tile_loadd(6, keys + (3 * steps + s) * B_TILE, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, scores, KEYS * 4);
    _tile_stored(1, scores + 16, KEYS * 4);
    _tile_stored(2, scores + 32, KEYS * 4);
    _tile_stored(3, scores + 48, KEYS * 4);
}

// sums [16][dim] += weights [16][64] * values
inline void sum_tiles(const uint16_t *weights, const uint16_t *values, int64_t dim, float *sums) {
    _tile_loadd(4, weights, KEYS * 2);
    _tile_loadd(5, weights + 32, KEYS * 2);
    for (int64_t d = 0; d < dim; d += 32, values += 4 * B_TILE) {
        _tile_loadd(0, sums + d, dim * 4);
        _tile_loadd(1, sums + d + 16, dim * 4);
        _tile_loadd(6, values, 64);
        _tile_loadd(7, values + 2 * B_TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, values + B_TILE, 64);
        _tile_loadd(7, values + 3 * B_TILE, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, sums + d, dim * 4);
        _tile_stored(1, sums + d + 16, dim * 4);
    }
}

// Scores become weights, query by query, and what was summed shrinks to them.
inline void weigh_tile(const Tile &tile, const Queries &queries, int64_t first, int64_t begin, float scale, int64_t dim, const float *scores,
                       uint16_t *weights) {
    for (int64_t r = 0; r < 16; r++) {
        int64_t i = first + r, low = std::max<int64_t>(0, queries.first[i] - begin), high = std::min(tile.count, queries.last[i] + 1 - begin);
        alignas(64) float row[KEYS];
        __m512 mine[4];
        for (int j = 0; j < 4; j++) mine[j] = _mm512_load_ps(scores + r * KEYS + 16 * j);
        float shrink = weigh512(queries.states[i], mine, low, high, tile, scale, row);
        for (int j = 0; j < 2; j++)
            _mm512_store_si512(weights + r * KEYS + 32 * j,
                               (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(row + 32 * j + 16), _mm512_load_ps(row + 32 * j)));
        if (shrink == 1.0f) continue;
        float *sum = queries.sums + i * dim;
        for (int64_t d = 0; d < dim; d += 16) _mm512_storeu_ps(sum + d, _mm512_mul_ps(_mm512_loadu_ps(sum + d), _mm512_set1_ps(shrink)));
    }
}

void attend_amx(const Model &model, const Layer &layer, const Step &step, const float *qkv, float *out, float *partials, const Task &task,
                void *scratch) {
    const int64_t dim = model.head_dim, group = model.heads / model.kv_heads;
    if (!fits_512(model) || task.queries * group < AT_LEAST_QUERIES)
        return attend_avx512(model, layer, step, qkv, out, partials, task, scratch);
    alignas(64) float scores[16 * KEYS];
    alignas(64) uint16_t weights[16 * KEYS];
    uint16_t *widened = (uint16_t *)scratch, *keys = widened + 2 * KEYS * dim, *values = keys + KEYS * dim;
    char *place = (char *)(values + KEYS * dim);
    Queries queries = load_queries(model, layer, step, qkv, task, place);
    const int64_t *table = step.tables + task.row * step.table_width;
    for (int64_t begin = std::max(task.begin, queries.first[0]); begin < task.end; begin += KEYS) {
        Tile tile;
        load_tile(model, layer, table, task.kv_head, begin, std::min<int64_t>(KEYS, task.end - begin), widened, tile);
        pack_keys(tile, dim, keys);
        pack_values(tile, dim, values);
        for (int64_t first = 0; first < queries.count; first += 16) {
            if (queries.last[std::min(first + 15, queries.count - 1)] < begin) continue;  // all of it is yet to come
            score_tiles(queries.values + first * dim, keys, dim, scores);
            weigh_tile(tile, queries, first, begin, model.attention_scale, dim, scores, weights);
            sum_tiles(weights, values, dim, queries.sums + first * dim);
        }
    }
    for (int64_t i = 0; i < queries.count; i++)
        finish(model, task, queries.states[i], queries.sums + i * dim, i / group, i % group, out, partials);
}

}  // namespace
}  // namespace octavo
