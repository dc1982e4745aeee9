// Attention with 512-bit registers, for bfloat16 and int8 caches, with heads of a multiple of 32 dimensions.
//
// A tile is 64 keys. bfloat16 keys are read in place; int8 values are converted to bfloat16 first, which is exact, and their
// scales are applied to the scores and the weights.
//
//     scores    each key times each query, 16 sums at a time folded into one register of 16 scores
//     weights   online softmax: exp(score - largest so far)
//     sums      weight times value, two keys at a time
#pragma once
#include "bf16_512.h"

namespace octavo {
namespace {

const int64_t MOST_DIM = 256;

struct Tile {                     // 64 keys of one kv head
    const uint16_t *keys[KEYS], *values[KEYS];
    float key_scale[KEYS], value_scale[KEYS];
    bool scaled;
    int64_t count;
};

inline bool fits_512(const Model &model, const Layer &layer) {
    return !layer.latent && (model.cache_kind == OCTAVO_BF16 || model.cache_kind == OCTAVO_Q8) && layer.head_dim % 32 == 0 && layer.head_dim <= MOST_DIM;
}

inline void widen(const int8_t *codes, uint16_t *to, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 32) {
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + d))));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + d + 16))));
        _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

// Finds the addresses of the keys [from, end) of a row that are in the tile from `begin` on, through its block table.
inline void find_tile(const Model &model, const Layer &layer, const int32_t *table, int64_t kv_head, int64_t begin, int64_t from, int64_t end,
                      Tile &tile) {
    const int64_t first = from - begin;
    const int64_t bytes = layer.head_dim * (model.cache_kind == OCTAVO_Q8 ? 1 : 2);
    tile.count = std::min<int64_t>(KEYS, end - begin);
    tile.scaled = model.cache_kind == OCTAVO_Q8;
    if (tile.count <= 0) return;
    Slots slots(table, layer.block_size, from);
    for (int64_t i = first; i < tile.count; i++) {
        int64_t head = slots.next() * layer.kv_heads + kv_head;
        tile.keys[i] = (const uint16_t *)((const char *)layer.k_cache + head * bytes);
        tile.values[i] = (const uint16_t *)((const char *)layer.v_cache + head * bytes);
        if (!tile.scaled) continue;
        tile.key_scale[i] = layer.k_scale[head];
        tile.value_scale[i] = layer.v_scale[head];
    }
    auto skip = [&](int64_t i) {  // any valid key: its scores are masked
        tile.keys[i] = tile.keys[first];
        tile.values[i] = tile.values[first];
        tile.key_scale[i] = tile.value_scale[i] = 0.0f;
    };
    for (int64_t i = 0; i < first; i++) skip(i);
    for (int64_t i = tile.count; i < KEYS; i++) skip(i);
}

// Converts int8 values to bfloat16, in widened: [2][KEYS][dim].
inline void widen_tile(Tile &tile, int64_t dim, uint16_t *widened) {
    for (int64_t i = 0; i < KEYS; i++) {
        widen((const int8_t *)tile.keys[i], widened + i * dim, dim);
        widen((const int8_t *)tile.values[i], widened + (KEYS + i) * dim, dim);
        tile.keys[i] = widened + i * dim;
        tile.values[i] = widened + (KEYS + i) * dim;
    }
}

// Prefetches a key and its value: they are in pieces too small for the hardware prefetcher.
inline void prefetch_key(const Tile &tile, int64_t i, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) {
        _mm_prefetch((const char *)tile.keys[i] + at, _MM_HINT_T0);
        _mm_prefetch((const char *)tile.values[i] + at, _MM_HINT_T0);
    }
}

// Converts scores of one query against a tile to weights, and updates the largest score and the total.
// Returns the factor by which earlier sums shrink. cap: of the scaled scores, or 0
inline float weigh512(Online &state, __m512 *scores, const Sight &sight, const Tile &tile, float scale, float cap) {
    const int64_t low = sight.low, high = sight.high;
    __m512 largest = _mm512_set1_ps(state.largest);
    const uint64_t seen = (high >= KEYS ? ~0ull : (1ull << std::max<int64_t>(0, high)) - 1) & (low >= KEYS ? 0 : ~0ull << low);
    for (int j = 0; j < 4; j++) {
        __m512 score = _mm512_mul_ps(scores[j], _mm512_set1_ps(scale));
        if (tile.scaled) score = _mm512_mul_ps(score, _mm512_loadu_ps(tile.key_scale + 16 * j));
        if (cap > 0) score = (__m512)capped(Lanes{{(Vector)score}}, cap).part[0];
        if (sight.slope != 0) {
            const __m512 distance = _mm512_add_ps((__m512)counted().part[0], _mm512_set1_ps(sight.distance + float(16 * j)));
            score = _mm512_fmadd_ps(distance, _mm512_set1_ps(sight.slope), score);
        }
        scores[j] = _mm512_mask_blend_ps(__mmask16(seen >> 16 * j), _mm512_set1_ps(-INFINITY), score);
        largest = _mm512_max_ps(largest, scores[j]);
    }
    float most = _mm512_reduce_max_ps(largest);
    if (most == -INFINITY) {
        for (int j = 0; j < 4; j++) scores[j] = _mm512_setzero_ps();
        return 1.0f;
    }
    __m512 total = _mm512_setzero_ps();
    for (int j = 0; j < 4; j++) {
        __m512 weight = power512<true>(_mm512_mul_ps(_mm512_sub_ps(scores[j], _mm512_set1_ps(most)), _mm512_set1_ps(LOG2_E)));
        scores[j] = _mm512_maskz_mov_ps(__mmask16(seen >> 16 * j), weight);
        total = _mm512_add_ps(total, scores[j]);
        if (tile.scaled) scores[j] = _mm512_mul_ps(scores[j], _mm512_loadu_ps(tile.value_scale + 16 * j));
    }
    float shrink = state.largest == most ? 1.0f : state.largest == -INFINITY ? 0.0f : fast_exp(state.largest - most);
    state = {most, multiply_add(state.total, shrink, _mm512_reduce_add_ps(total))};
    return shrink;
}

inline __m512bh load_bh(const uint16_t *x) { return (__m512bh)_mm512_loadu_si512(x); }

// Interleaves two keys, for 32 dimensions: the first 16 dimensions, and the second.
struct Pairing {
    __m512i first, second;
    Pairing() {
        alignas(64) uint16_t low[32], high[32];
        for (int i = 0; i < 16; i++) {
            low[2 * i] = uint16_t(i), low[2 * i + 1] = uint16_t(32 + i);
            high[2 * i] = uint16_t(16 + i), high[2 * i + 1] = uint16_t(48 + i);
        }
        first = _mm512_load_si512(low), second = _mm512_load_si512(high);
    }
};

// R queries against a tile. q: [R][dim] bfloat16; sums: [R][dim]
template <int R> void attend_tile(const Tile &tile, const Tile &next_tile, const uint16_t *q, int64_t dim, const Sight *sight, float scale,
                                  float cap, Online *states, float *sums) {
    const int64_t next_bytes = tile.scaled ? dim : 2 * dim;
    alignas(64) float scores[R][KEYS];
    for (int j = 0; j < KEYS; j += 16) {
        __m512 folded[R][8];
        for (int i = 0; i < 8; i++) {
            const uint16_t *key = tile.keys[j + 2 * i], *next = tile.keys[j + 2 * i + 1];
            if (next_tile.count > 0) {
                prefetch_key(next_tile, j + 2 * i, next_bytes);
                prefetch_key(next_tile, j + 2 * i + 1, next_bytes);
            }
            __m512 first[R], second[R];
            for (int r = 0; r < R; r++) first[r] = second[r] = _mm512_setzero_ps();
            for (int64_t d = 0; d < dim; d += 32)
                for (int r = 0; r < R; r++) {
                    first[r] = _mm512_dpbf16_ps(first[r], load_bh(key + d), load_bh(q + r * dim + d));
                    second[r] = _mm512_dpbf16_ps(second[r], load_bh(next + d), load_bh(q + r * dim + d));
                }
            for (int r = 0; r < R; r++) folded[r][i] = fold2(first[r], second[r]);
        }
        for (int r = 0; r < R; r++) _mm512_store_ps(scores[r] + j, fold8(folded[r]));
    }
    alignas(64) uint16_t weights[R][KEYS];
    float shrink[R];
    for (int r = 0; r < R; r++) {
        __m512 mine[4];
        for (int j = 0; j < 4; j++) mine[j] = _mm512_load_ps(scores[r] + 16 * j);
        shrink[r] = weigh512(states[r], mine, sight[r], tile, scale, cap);
        for (int j = 0; j < 2; j++) _mm512_store_si512(weights[r] + 32 * j, (__m512i)_mm512_cvtne2ps_pbh(mine[2 * j + 1], mine[2 * j]));
    }
    const Pairing pairing;
    for (int64_t d = 0; d < dim; d += 32) {  // R x 32 sums in registers
        __m512 first[R], second[R];
        for (int r = 0; r < R; r++) {
            first[r] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + d), _mm512_set1_ps(shrink[r]));
            second[r] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + d + 16), _mm512_set1_ps(shrink[r]));
        }
        for (int64_t i = 0; i < tile.count; i += 2) {
            __m512i value = _mm512_loadu_si512(tile.values[i] + d), next = _mm512_loadu_si512(tile.values[i + 1] + d);
            __m512bh lower = (__m512bh)_mm512_permutex2var_epi16(value, pairing.first, next);
            __m512bh upper = (__m512bh)_mm512_permutex2var_epi16(value, pairing.second, next);
            for (int r = 0; r < R; r++) {
                first[r] = _mm512_dpbf16_ps(first[r], lower, pair(weights[r] + i));
                second[r] = _mm512_dpbf16_ps(second[r], upper, pair(weights[r] + i));
            }
        }
        for (int r = 0; r < R; r++) {
            _mm512_storeu_ps(sums + r * dim + d, first[r]);
            _mm512_storeu_ps(sums + r * dim + d + 16, second[r]);
        }
    }
}

// The queries of a task in bfloat16, query by query and head by head, and their visible positions. Returns how many there are.
struct Queries {
    uint16_t *values;             // [count][dim]
    Results results;
    int64_t *first, *last;        // positions that each may see: [first, last]
    int64_t earliest;             // the first position that any of them may see
    int64_t count;
};

inline Queries load_queries(const Layer &layer, const Step &step, const float *qkv, const Task &task, char *&scratch) {
    const int64_t dim = layer.head_dim, group = layer.heads / layer.kv_heads, heads = read_heads(layer);
    Queries queries{};
    queries.count = task.queries * group;
    queries.earliest = INT64_MAX;
    const int64_t room = (queries.count + 15) / 16 * 16;  // whole tiles of 16
    auto take = [&](int64_t bytes) {
        char *place = scratch;
        scratch += (bytes + 63) / 64 * 64;
        return place;
    };
    queries.values = (uint16_t *)take(room * dim * 2);
    float *sums = (float *)take(room * dim * 4), *joined = (float *)take(room * dim * 4);
    Online *states = (Online *)take(2 * room * sizeof(Online));
    queries.results = {queries.count, room, dim, dim, sums, joined, states, states + room};
    queries.first = (int64_t *)take(room * 8);
    queries.last = (int64_t *)take(room * 8);
    for (int64_t i = 0; i < room; i++) {
        if (i >= queries.count) {
            memset(queries.values + i * dim, 0, size_t(dim * 2));
            queries.first[i] = 0;
            queries.last[i] = -1;
            continue;
        }
        const float *q = qkv + (task.token_of(i / group) * heads + task.kv_head * group + i % group) * dim;
        for (int64_t d = 0; d < dim; d += 32)
            _mm512_storeu_si512(queries.values + i * dim + d, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(q + d + 16), _mm512_loadu_ps(q + d)));
        queries.last[i] = step.cache_index[task.token_of(i / group)];
        queries.first[i] = first_seen(layer, queries.last[i]);
        queries.earliest = std::min(queries.earliest, queries.first[i]);
    }
    return queries;
}

void attend_avx512bf16(const Model &model, const Layer &layer, const Step &step, const float *qkv, const Target &out, float *partials,
                   const Task &task, void *scratch) {
    if (!fits_512(model, layer)) return attend_floats(model, layer, step, qkv, out, partials, task, scratch);
    const int64_t dim = layer.head_dim, group = layer.heads / layer.kv_heads;
    char *place = (char *)scratch;
    uint16_t *widened = (uint16_t *)place;
    place += 2 * KEYS * dim * 2;
    Queries queries = load_queries(layer, step, qkv, task, place);
    const int32_t *table = table_of(layer, step, task.row);
    Tile tile, next;
    next.count = 0;
    auto attend = [&](int64_t begin, int64_t from) {
        if (next.count <= 0) find_tile(model, layer, table, task.kv_head, begin, from, task.end, next);
        tile = next;
        if (tile.scaled) widen_tile(tile, dim, widened);
        find_tile(model, layer, table, task.kv_head, begin + KEYS, begin + KEYS, task.end, next);
        for (int64_t i = 0; i < queries.count; i += 4) {
            Sight sight[4];
            const int64_t rows = std::min<int64_t>(4, queries.count - i);
            for (int64_t r = 0; r < rows; r++)
                sight[r] = sight_of(layer, task.kv_head * group + (i + r) % group, queries.last[i + r], begin, tile.count);
            uint16_t *q = queries.values + i * dim;
            float *sums = queries.results.sums + i * dim;
            Online *states = queries.results.states + i;
            const float scale = layer.attention_scale, cap = layer.soft_cap;
            switch (rows) {
                case 1: attend_tile<1>(tile, next, q, dim, sight, scale, cap, states, sums); break;
                case 2: attend_tile<2>(tile, next, q, dim, sight, scale, cap, states, sums); break;
                case 3: attend_tile<3>(tile, next, q, dim, sight, scale, cap, states, sums); break;
                default: attend_tile<4>(tile, next, q, dim, sight, scale, cap, states, sums);
            }
        }
    };
    by_pieces(task, queries.results, queries.earliest, partials, attend, [] {});
    finish(layer, task, qkv, queries.results, out, partials);
}

}  // namespace
}  // namespace octavo
