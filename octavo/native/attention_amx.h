// Attention with AMX tiles. A set is 16 queries or fewer, one per lane, processed against 64 keys at a time:
//
//     scores [64 keys x 16]  = keys [64 x dim] * queries^T        B tiles: queries transposed, pairs of dimensions interleaved
//     weights [64 keys x 16]   by online softmax, lane by lane, in bfloat16, then transposed
//     sums [16 x dim]       += weights^T [16 x 64] * values       B tiles: pairs of keys interleaved
//
// Lanes do not depend on each other, so a query has the same bits in a set of its own. Values are interleaved once for all sets of the
// task. Scores are not capped here: layers with a cap use kernels without tiles.
#pragma once
#include "tiles_amx.h"

namespace octavo {
namespace {

const int64_t LANES = 16;
const float NOTHING = -1e30f;  // the initial largest score

// Transposes 16 x 16 numbers of 32 bits.
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

const int64_t TILE_HALVES = 16 * 32;  // bfloat16 numbers in a tile

struct Set {
    uint16_t *queries;            // [dim / 32][16 pairs of dimensions][16][2]
    float *sums;                  // [16][dim]
    int64_t count;                // of queries
    __m512 largest, total;        // scores are in units of log2 here
    __m512i first, last;          // positions that each may see
    int64_t earliest, latest;     // positions that any of them may see
    int64_t all_from, all_to;     // positions that all may see
    __m512 slopes, positions;     // of ALiBi: slopes, in units of log2, and the positions of the queries
};

// Converts 16 rows of bfloat16 to tiles of pairs: to [dim / 32][16 pairs][16 rows][2]
inline void turn(const uint16_t *rows, int64_t dim, uint16_t *to) {
    for (int64_t d = 0; d < dim; d += 32, to += TILE_HALVES) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows + i * dim + d);
        transpose16(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + 32 * i, r[i]);
    }
}

inline Set make_set(const Layer &layer, int64_t kv_head, const Queries &queries, int64_t begin, int64_t end, uint16_t *turned) {
    const int64_t dim = layer.head_dim, group = layer.heads / layer.kv_heads;
    Set set{turned, queries.results.sums + begin * dim, std::min(LANES, queries.count - begin), _mm512_set1_ps(NOTHING), _mm512_setzero_ps(), {}, {}, INT64_MAX, -1, 0, INT64_MAX, {}, {}};
    alignas(64) int32_t first[LANES], last[LANES];
    alignas(64) float slopes[LANES], positions[LANES];
    for (int64_t i = 0; i < LANES; i++) {
        int64_t from = queries.first[begin + i], to = std::min(queries.last[begin + i], end - 1);
        first[i] = int32_t(from), last[i] = int32_t(to);
        set.all_from = std::max(set.all_from, from), set.all_to = std::min(set.all_to, to);
        set.earliest = std::min(set.earliest, from), set.latest = std::max(set.latest, to);
        slopes[i] = slope_of(layer, kv_head * group + (begin + i) % group) * LOG2_E, positions[i] = float(queries.last[begin + i]);
    }
    set.slopes = _mm512_load_ps(slopes), set.positions = _mm512_load_ps(positions);
    set.first = _mm512_load_si512(first), set.last = _mm512_load_si512(last);
    turn(queries.values + begin * dim, dim, turned);
    return set;
}

// to: [dim / 16][2 halves of the keys][16 pairs of keys][16 dimensions][2]. Keys and values of the next tile are prefetched.
inline void pair_values(const Tile &tile, const Tile &next, int64_t dim, uint16_t *to) {
    const Pairing pairing;
    const int64_t next_bytes = tile.scaled ? dim : 2 * dim;
    for (int64_t i = 0; i < KEYS / 2; i++) {
        if (next.count > 0) prefetch_key(next, 2 * i, next_bytes), prefetch_key(next, 2 * i + 1, next_bytes);
        for (int64_t d = 0; d < dim; d += 32) {
            const __m512i a = _mm512_loadu_si512(tile.values[2 * i] + d), b = _mm512_loadu_si512(tile.values[2 * i + 1] + d);
            uint16_t *place = to + (d / 16 * 2 + i / 16) * TILE_HALVES + i % 16 * 32;
            _mm512_store_si512(place, _mm512_permutex2var_epi16(a, pairing.first, b));
            _mm512_store_si512(place + 2 * TILE_HALVES, _mm512_permutex2var_epi16(a, pairing.second, b));
        }
    }
}

// The keys of a tile, 16 at a time: equally far apart.
struct KeyRows {
    const uint16_t *rows[KEYS / 16];
    int64_t bytes[KEYS / 16];     // from one key to the next
};

// 16 keys of a block are read in place. first: the first of the tile that can be seen. memory: [64][dim]
inline KeyRows find_rows(const Layer &layer, const Tile &tile, int64_t first, uint16_t *memory) {
    const int64_t dim = layer.head_dim;
    KeyRows found;
    for (int64_t i = 0, j = 0; j < KEYS; i++, j += 16) {
        const bool in_block = layer.block_size % 16 == 0 && j >= first && j + 16 <= tile.count;
        found.rows[i] = tile.keys[j], found.bytes[i] = tile.scaled ? dim * 2 : layer.kv_heads * dim * 2;
        if (tile.scaled || in_block) continue;
        for (int64_t key = j; key < j + 16; key++) memcpy(memory + key * dim, tile.keys[key], size_t(dim) * 2);
        found.rows[i] = memory + j * dim, found.bytes[i] = dim * 2;
    }
    return found;
}

// scores: [64][16]
inline void score_tiles(const KeyRows &keys, const uint16_t *queries, int64_t dim, float *scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim; d += 32, queries += TILE_HALVES) {
        _tile_loadd(6, queries, 64);
        _tile_loadd(4, keys.rows[0] + d, keys.bytes[0]);
        _tile_loadd(5, keys.rows[1] + d, keys.bytes[1]);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, keys.rows[2] + d, keys.bytes[2]);
        _tile_loadd(5, keys.rows[3] + d, keys.bytes[3]);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + 16 * LANES, 64);
    _tile_stored(2, scores + 32 * LANES, 64);
    _tile_stored(3, scores + 48 * LANES, 64);
}

// sums [16][dim] += weights^T * values. weights: [2 halves of the keys][16][32 keys]
inline void sum_tiles(const uint16_t *values, const uint16_t *weights, int64_t dim, float *sums) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, weights + TILE_HALVES, 64);
    for (int64_t d = 0; d < dim; d += 32, values += 4 * TILE_HALVES) {
        _tile_loadd(0, sums + d, dim * 4);
        _tile_loadd(1, sums + d + 16, dim * 4);
        _tile_loadd(6, values, 64);
        _tile_loadd(7, values + 2 * TILE_HALVES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, values + TILE_HALVES, 64);
        _tile_loadd(7, values + 3 * TILE_HALVES, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, sums + d, dim * 4);
        _tile_stored(1, sums + d + 16, dim * 4);
    }
}

// Multiplies the sums of the queries in `lanes` by their factors.
inline void shrink_sums(const Set &set, __mmask16 lanes, __m512 factors, int64_t dim) {
    alignas(64) float factor[LANES];
    _mm512_store_ps(factor, factors);
    for (int64_t i = 0; i < set.count; i++)
        for (int64_t d = 0; d < dim && (lanes >> i & 1); d += 16) {
            float *sums = set.sums + i * dim + d;
            _mm512_storeu_ps(sums, _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(factor[i])));
        }
}

// Converts scores [64][16] of keys from position `begin` on to weights [2][16][32], and scales earlier sums accordingly.
// EDGE: some queries may not see all keys. ALIBI: distances are added to scores, which are then in units of log2 already.
template <bool EDGE, bool SCALED, bool ALIBI>
void weigh_edge(Set &set, const Tile &tile, int64_t begin, float scale, int64_t dim, const float *scores, uint16_t *weights) {
    const __m512 factor = _mm512_set1_ps(ALIBI ? 1.0f : scale * LOG2_E), never = _mm512_set1_ps(-INFINITY);
    auto score = [&](int64_t key) {
        __m512 row = _mm512_load_ps(scores + key * LANES);
        if (SCALED) row = _mm512_mul_ps(row, _mm512_set1_ps(tile.key_scale[key]));
        if (!ALIBI) return row;
        const __m512 distance = _mm512_sub_ps(_mm512_set1_ps(float(begin + key)), set.positions);
        return _mm512_fmadd_ps(distance, set.slopes, _mm512_mul_ps(row, _mm512_set1_ps(scale * LOG2_E)));
    };
    auto seen = [&](int64_t key) {
        __m512i position = _mm512_set1_epi32(int32_t(begin + key));
        return _mm512_cmple_epi32_mask(set.first, position) & _mm512_cmple_epi32_mask(position, set.last);
    };
    __m512 most[4] = {never, never, never, never};
    for (int64_t key = 0; key < KEYS; key += 4)
        for (int i = 0; i < 4; i++) most[i] = _mm512_mask_max_ps(most[i], EDGE ? seen(key + i) : 0xffff, most[i], score(key + i));
    __m512 tile_most = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    __m512 largest = _mm512_max_ps(set.largest, _mm512_mul_ps(tile_most, factor));
    if (const __mmask16 lanes = _mm512_cmp_ps_mask(largest, set.largest, _CMP_NEQ_UQ)) {
        const __m512 shrink = power512(_mm512_sub_ps(set.largest, largest));
        set.total = _mm512_mask_mul_ps(set.total, lanes, set.total, shrink);
        shrink_sums(set, lanes, shrink, dim);
        set.largest = largest;
    }
    const __m512i interleave = interleave512();
    __m512 totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    __m512i pairs[LANES];
    for (int64_t key = 0; key < KEYS; key += 2) {
        __m512 pair[2];
        for (int i = 0; i < 2; i++) {
            pair[i] = power512<true>(_mm512_fmsub_ps(score(key + i), factor, largest));
            if (EDGE) pair[i] = _mm512_maskz_mov_ps(seen(key + i), pair[i]);
            totals[i] = _mm512_add_ps(totals[i], pair[i]);
            if (SCALED) pair[i] = _mm512_mul_ps(pair[i], _mm512_set1_ps(tile.value_scale[key + i]));
        }
        pairs[key / 2 % 16] = _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(pair[1], pair[0]));
        if (key % 32 < 30) continue;
        transpose16(pairs);
        for (int64_t i = 0; i < LANES; i++) _mm512_store_si512(weights + (key / 32 * LANES + i) * 32, pairs[i]);
    }
    set.total = _mm512_add_ps(set.total, _mm512_add_ps(totals[0], totals[1]));
}

template <bool SCALED, bool ALIBI>
void weigh_set(Set &set, const Tile &tile, int64_t begin, float scale, int64_t dim, const float *scores, uint16_t *weights) {
    const bool edge = begin < set.all_from || begin + KEYS - 1 > set.all_to;
    (edge ? weigh_edge<true, SCALED, ALIBI> : weigh_edge<false, SCALED, ALIBI>)(set, tile, begin, scale, dim, scores, weights);
}

// Ends a piece: stores the states of a set.
inline void collect_set(Set &set, Online *states) {
    alignas(64) float largest[LANES], total[LANES];
    _mm512_store_ps(largest, set.largest);
    _mm512_store_ps(total, set.total);
    for (int i = 0; i < LANES; i++) states[i] = {largest[i] <= NOTHING ? -INFINITY : largest[i] / LOG2_E, total[i]};
    set.largest = _mm512_set1_ps(NOTHING), set.total = _mm512_setzero_ps();
}

void attend_amx(const Model &model, const Layer &layer, const Step &step, const float *qkv, const Target &out, float *partials, const Task &task,
                void *scratch) {
    const int64_t dim = layer.head_dim;
    if (!fits_512(model, layer) || layer.soft_cap > 0)
        return attend_avx512bf16(model, layer, step, qkv, out, partials, task, scratch);
    alignas(64) float scores[2][KEYS * LANES];
    alignas(64) uint16_t weights[KEYS * LANES];
    uint16_t *widened = (uint16_t *)scratch, *copied = widened + 2 * KEYS * dim, *values = copied + KEYS * dim;
    char *place = (char *)(values + KEYS * dim);
    Queries queries = load_queries(layer, step, qkv, task, place);
    const int64_t count = (queries.count + LANES - 1) / LANES;
    Set *sets = (Set *)place;
    uint16_t *turned = (uint16_t *)(sets + count);
    for (int64_t i = 0; i < count; i++) sets[i] = make_set(layer, task.kv_head, queries, i * LANES, task.end, turned + i * LANES * dim);
    const int32_t *table = table_of(layer, step, task.row);
    const bool scaled = model.cache_kind == OCTAVO_Q8;
    load_config(TILE, 64);
    const auto plain = scaled ? weigh_set<true, false> : weigh_set<false, false>, sloped = scaled ? weigh_set<true, true> : weigh_set<false, true>;
    Tile tile, next;
    next.count = 0;
    auto attend = [&](int64_t begin, int64_t from) {
        if (next.count <= 0) find_tile(model, layer, table, task.kv_head, begin, from, task.end, next);
        tile = next;
        if (tile.scaled) widen_tile(tile, dim, widened);
        find_tile(model, layer, table, task.kv_head, begin + KEYS, begin + KEYS, task.end, next);
        const KeyRows keys = find_rows(layer, tile, from - begin, copied);
        pair_values(tile, next, dim, values);
        auto next_set = [&](int64_t i) {
            while (i < count && (sets[i].latest < begin || sets[i].earliest >= begin + KEYS)) i++;
            return i;
        };
        // Tiles compute the scores of the next set while the vector units process this one.
        int64_t now = next_set(0), turn = 0;
        if (now < count) score_tiles(keys, sets[now].queries, dim, scores[0]);
        for (int64_t then; now < count; now = then, turn ^= 1) {
            then = next_set(now + 1);
            if (then < count) score_tiles(keys, sets[then].queries, dim, scores[turn ^ 1]);
            (layer.alibi ? sloped : plain)(sets[now], tile, begin, layer.attention_scale, dim, scores[turn], weights);
            sum_tiles(values, weights, dim, sets[now].sums);
        }
    };
    auto collect = [&] {
        for (int64_t i = 0; i < count; i++) collect_set(sets[i], queries.results.states + i * LANES);
    };
    by_pieces(task, queries.results, queries.earliest, partials, attend, collect);
    finish(layer, task, qkv, queries.results, out, partials);
}

}  // namespace
}  // namespace octavo
