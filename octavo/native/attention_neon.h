// Attention in float16 over float16 caches, with heads of a multiple of 16 dimensions. Shared by the levels neon and i8mm.
//
// A tile is 64 keys, read in place, or in panels if there are many queries. Products of 64 dimensions or of 32 keys are summed in
// float16, and then in float32. The bits of a query do not depend on the other queries.
//
//     scores    each key times each query, which is scaled to at most 1/128, so that no key overflows;
//               the sums of 8 keys are folded into 8 lanes
//     weights   online softmax in float32, then float16
//     sums      weight times value, 16 dimensions at a time; if the values of a query are so large that a sum overflows float16, they
//               are weighted again by 1/64, which would lose precision for small values
#pragma once
#include "attention_panels.h"

namespace octavo {
namespace {

const float QUERY_ROOM = 128;    // for 64 products of the largest numbers, and rounding
const float ROOM = 64;           // for 32 of them

inline bool fits_halves(const Model &model, const Layer &layer) {
    return !layer.latent && model.cache_kind == OCTAVO_F16 && layer.head_dim % LANE_COUNT == 0;
}

struct HalfTile {                // 64 keys of one kv head
    const float16_t *keys[KEYS], *values[KEYS];
    int64_t count;
};

// Finds the addresses of the keys [from, end) of a row that are in the tile from `begin` on, through its block table; others are zero.
inline void find_tile(const Layer &layer, const int32_t *table, int64_t kv_head, int64_t begin, int64_t from, int64_t end,
                      const float16_t *zeros, HalfTile &tile) {
    tile.count = std::clamp<int64_t>(end - begin, 0, KEYS);
    for (int64_t i = 0; i < from - begin; i++) tile.keys[i] = tile.values[i] = zeros;
    Slots slots(table, layer.block_size, from);
    for (int64_t i = from - begin; i < tile.count; i++) {
        const int64_t place = (slots.next() * layer.kv_heads + kv_head) * layer.head_dim;
        tile.keys[i] = (const float16_t *)layer.k_cache + place;
        tile.values[i] = (const float16_t *)layer.v_cache + place;
    }
    for (int64_t i = tile.count; i < KEYS; i++) tile.keys[i] = tile.values[i] = zeros;
}

// Prefetches 8 keys and their values: they are in pieces too small for the hardware prefetcher.
INLINE void prefetch_keys(const HalfTile &tile, int64_t j, int64_t dim) {
    for (int64_t i = j; i < std::min<int64_t>(j + 8, tile.count); i++)
        for (int64_t d = 0; d < dim; d += 32) {
            __builtin_prefetch(tile.keys[i] + d);
            __builtin_prefetch(tile.values[i] + d);
        }
}

// R queries times 4 keys, over dimensions [d, end) of a fold: half of the sum of a key in each lane.
template <int R> INLINE void score_four(const float16_t *const *keys, const float16_t *q, int64_t width, int64_t d, int64_t end, float16x8_t *sums) {
    float16x8_t made[4][R] = {};
    for (; d < end; d += LANE_COUNT)
        for (int half = 0; half < 2; half++) {
            float16x8_t x[R];
            for (int r = 0; r < R; r++) x[r] = vld1q_f16(q + r * width + d + 8 * half);
            for (int n = 0; n < 4; n++) {
                const float16x8_t numbers = vld1q_f16(keys[n] + d + 8 * half);
                for (int r = 0; r < R; r++) made[n][r] = vfmaq_f16(made[n][r], numbers, x[r]);
            }
        }
    for (int r = 0; r < R; r++) sums[r] = vpaddq_f16(vpaddq_f16(made[0][r], made[1][r]), vpaddq_f16(made[2][r], made[3][r]));
}

// R queries times keys [j, j + 8) of a tile.
template <int R>
INLINE void score_keys(const HalfTile &tile, int64_t j, const float16_t *q, int64_t dim, const float *scale, float (*scores)[KEYS]) {
    const int64_t width = whole_folds(dim);
    float32x4_t low[R], high[R];
    for (int r = 0; r < R; r++) low[r] = high[r] = vdupq_n_f32(0);
    for (int64_t d = 0; d < dim; d += FOLD) {
        float16x8_t sums[R], others[R];
        score_four<R>(tile.keys + j, q, width, d, std::min(dim, d + FOLD), sums);
        score_four<R>(tile.keys + j + 4, q, width, d, std::min(dim, d + FOLD), others);
        for (int r = 0; r < R; r++) {
            sums[r] = vpaddq_f16(sums[r], others[r]);  // one key per lane
            low[r] = vaddq_f32(low[r], vcvt_f32_f16(vget_low_f16(sums[r])));
            high[r] = vaddq_f32(high[r], vcvt_high_f32_f16(sums[r]));
        }
    }
    for (int r = 0; r < R; r++) {
        vst1q_f32(scores[r] + j, vmulq_n_f32(low[r], scale[r]));
        vst1q_f32(scores[r] + j + 4, vmulq_n_f32(high[r], scale[r]));
    }
}

template <int COUNT> INLINE bool all_finite(const Lanes *acc) {
    Vector check = {};
    for (int i = 0; i < COUNT; i++)
        for (int p = 0; p < PARTS; p++) check += acc[i].part[p] * 0.0f;
    return vmaxvq_f32((float32x4_t)check) == 0;  // as bits, NaN is larger than any number
}

// The weighted sum of keys [first, last), multiples of 8, for D * 16 dimensions of R queries. room: what weights were divided by
template <int R, int D>
INLINE void weigh_values(const HalfTile &tile, int64_t first, int64_t last, int64_t d, const float16_t (*weights)[KEYS], float room, Lanes (*acc)[D]) {
    for (int64_t key = first; key < last;) {
        float16x8_t made[R][2 * D] = {};
        const int64_t end = std::min(last, key / CARRY * CARRY + CARRY);
        do {
            float16x8_t numbers[R];
            for (int r = 0; r < R; r++) numbers[r] = vld1q_f16(weights[r] + key);
            unrolled<8>([&](auto lane) {
                for (int i = 0; i < 2 * D; i++) {
                    const float16x8_t values = vld1q_f16(tile.values[key + lane] + d + 8 * i);
                    for (int r = 0; r < R; r++) made[r][i] = multiply_add<lane>(values, numbers[r], made[r][i]);
                }
            });
            key += 8;
        } while (key < end);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < D; i++) acc[r][i] = carry(made[r] + 2 * i, room, acc[r][i]);
    }
}

// The same over all keys of a tile, for 16 dimensions of a query whose values are too large for sums in float16.
__attribute__((noinline)) Lanes weigh_large_values(const HalfTile &tile, int64_t d, const float16_t *weights, Lanes acc) {
    float16_t divided[1][KEYS];
    for (int j = 0; j < KEYS; j += 8) vst1q_f16(divided[0] + j, vmulq_n_f16(vld1q_f16(weights + j), float16_t(1 / ROOM)));
    Lanes made[1][1] = {{acc}};
    weigh_values<1, 1>(tile, 0, KEYS, d, divided, ROOM, made);
    return made[0][0];
}

template <int R, int D>
INLINE void add_values(const HalfTile &tile, int64_t first, int64_t last, int64_t d, int64_t dim, const float16_t (*weights)[KEYS], const float *shrink,
                       float *sums) {
    auto at = [&](int r, int i) { return sums + r * dim + d + i * LANE_COUNT; };
    Lanes acc[R][D];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < D; i++) acc[r][i] = load(at(r, i)) * shrink[r];
    weigh_values<R, D>(tile, first, last, d, weights, 1, acc);
    if (!all_finite<R * D>(acc[0]))
        for (int r = 0; r < R; r++)
            for (int i = 0; i < D; i++)
                if (!all_finite<1>(&acc[r][i])) acc[r][i] = weigh_large_values(tile, d + i * LANE_COUNT, weights[r], load(at(r, i)) * shrink[r]);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < D; i++) store(acc[r][i], at(r, i));
}

// R queries against a tile. q: [R][whole folds of dimensions], scale: of each; sums: [R][dim]
template <int R>
void attend_tile(const HalfTile &tile, const HalfTile &next, const float16_t *q, int64_t dim, const Sight *sight, const float *scale, float cap,
                 Online *states, float *sums) {
    alignas(64) float scores[R][KEYS];
    float16_t weights[R][KEYS];
    float shrink[R];
    int64_t first, last;
    join_sights<R>(sight, first, last);
    first = first / 8 * 8, last = (last + 7) / 8 * 8;
    for (int64_t j = first; j < last; j += 8) {
        prefetch_keys(next, j, dim);
        score_keys<R>(tile, j, q, dim, scale, scores);
    }
    for (int r = 0; r < R; r++) shrink[r] = weigh_halves(states[r], scores[r], sight[r], cap, weights[r]);
    const int D = R < 4 ? 2 : 1;  // enough independent sums that none waits for the previous one
    int64_t d = 0;
    for (; d + D * LANE_COUNT <= dim; d += D * LANE_COUNT) add_values<R, D>(tile, first, last, d, dim, weights, shrink, sums);
    if constexpr (D > 1)
        if (d < dim) add_values<R, 1>(tile, first, last, d, dim, weights, shrink, sums);
}

struct HalfQueries {             // the queries of a task, query by query and head by head
    float16_t *values;           // [count][whole folds of dimensions], at most 1 / QUERY_ROOM; if there are many, in the order of panels
    Results results;
    float *scale;                // [count]: scale of scores
    int64_t *positions;          // [count]
    int64_t earliest, count;     // earliest: the first position that any of them may see
    bool many;
};

// q, divided by scale. in_panels: in the order of panels of keys
inline void load_query(const float *q, int64_t dim, float scale, bool in_panels, uint16_t *to) {
    uint16_t halves[LANE_COUNT];
    for (int64_t d = 0; d < dim; d += LANE_COUNT) {
        store_f16(load(q + d) * (1 / scale), halves);
        for (int64_t i = 0; i < LANE_COUNT; i++) to[in_panels ? place_of(d + i) : d + i] = halves[i];
    }
}

// memory: for whole blocks of ROWS queries. Missing queries and dimensions are zero.
inline HalfQueries load_queries(const Layer &layer, const Step &step, const float *qkv, const Task &task, float *memory) {
    const int64_t dim = layer.head_dim, group = layer.heads / layer.kv_heads, heads = read_heads(layer), count = task.queries * group;
    const int64_t whole = (count + ROWS - 1) / ROWS * ROWS, width = whole_folds(dim);
    float *joined = memory + whole * dim, *scales = joined + whole * dim;
    Online *states = (Online *)(scales + whole);
    HalfQueries queries{nullptr, {count, whole, dim, dim, memory, joined, states, states + whole}, scales, nullptr, INT64_MAX, count, false};
    queries.many = count >= MANY && width <= MOST_SPANS * CHAIN;
    queries.positions = (int64_t *)(states + 2 * whole);
    queries.values = (float16_t *)(queries.positions + whole);
    std::fill(queries.scale + count, queries.scale + whole, 0.0f);
    std::fill(queries.positions + count, queries.positions + whole, -1);
    std::fill(queries.values, queries.values + whole * width, float16_t(0));
    for (int64_t i = 0; i < count; i++) {
        const float *q = qkv + (task.token_of(i / group) * heads + task.kv_head * group + i % group) * dim;
        const float scale = power_above(largest_of(q, dim)) * QUERY_ROOM;
        load_query(q, dim, scale, queries.many, (uint16_t *)queries.values + i * width);
        queries.scale[i] = scale * layer.attention_scale;
        queries.positions[i] = step.cache_index[task.token_of(i / group)];
        queries.earliest = std::min(queries.earliest, first_seen(layer, queries.positions[i]));
    }
    return queries;
}

// 8 queries against a tile that was laid out in panels. See `attend_tile`.
inline void attend_eight(const HalfTile &tile, const PanelTile &panels, const float16_t *q, int64_t dim, const Sight *sight, const float *scale,
                         float cap, Online *states, float *sums) {
    float16_t weights[ROWS][KEYS];
    float shrink[ROWS];
    attend_panels(panels, q, dim, sight, scale, cap, states, weights, shrink, sums, [&](int r, int64_t d) {
        return weigh_large_values(tile, d, weights[r], load(sums + r * dim + d) * shrink[r]);
    });
}

// Queries against the keys of a row, through its block table.
void attend_halves(const Model &model, const Layer &layer, const Step &step, const float *qkv, const Target &out, float *partials, const Task &task,
                   void *scratch) {
    if (!fits_halves(model, layer)) return attend_floats(model, layer, step, qkv, out, partials, task, scratch);
    const int64_t dim = layer.head_dim, group = layer.heads / layer.kv_heads, width = whole_folds(dim);
    const int32_t *table = table_of(layer, step, task.row);
    float *memory = (float *)scratch;
    const PanelTile panels{(float16_t *)(memory + dim), (float16_t *)(memory + dim) + KEYS * width};
    const HalfQueries queries = load_queries(layer, step, qkv, task, memory + dim + KEYS * width);
    std::fill(memory, memory + dim, 0.0f);  // a missing key
    if (queries.many) std::fill(panels.keys, panels.values, float16_t(0));  // dimensions that heads do not have
    HalfTile tile, next, none;
    next.count = none.count = 0;
    auto attend = [&](int64_t begin, int64_t from) {
        auto find = [&](int64_t begin, int64_t from, HalfTile &tile) {
            find_tile(layer, table, task.kv_head, begin, from, task.end, (const float16_t *)memory, tile);
        };
        if (next.count == 0) {
            find(begin, from, next);
            for (int64_t j = 0; j < next.count && !queries.many; j += 8) prefetch_keys(next, j, dim);  // only small batches would wait for the keys
        }
        tile = next;
        find(begin + KEYS, begin + KEYS, next);
        if (queries.many) lay_out(tile.keys, tile.values, dim, panels);
        const int64_t at_once = queries.many ? ROWS : QUERIES_AT_ONCE;
        for (int64_t i = 0; i < queries.count; i += at_once) {
            const int64_t rows = queries.many ? at_once : std::min(at_once, queries.count - i);
            Sight sights[ROWS];
            for (int64_t r = 0; r < rows; r++) {
                const int64_t position = queries.positions[i + r], head = task.kv_head * group + (i + r) % group;
                sights[r] = position < 0 ? Sight{KEYS, 0, 0, 0} : sight_of(layer, head, position, begin, tile.count);  // a missing query sees nothing
            }
            const Sight *sight = sights;
            const float16_t *q = queries.values + i * width;
            const float *scale = queries.scale + i;
            Online *states = queries.results.states + i;
            float *sums = queries.results.sums + i * dim;
            if (queries.many) {
                if (i < KEYS) prefetch_keys(next, i, dim);
                attend_eight(tile, panels, q, dim, sight, scale, layer.soft_cap, states, sums);
            } else {
                attend_rows<QUERIES_AT_ONCE>(rows, tile, i == 0 ? next : none, q, dim, sight, scale, layer.soft_cap, states, sums);
            }
        }
    };
    by_pieces(task, queries.results, queries.earliest, partials, attend, [] {});
    finish(layer, task, qkv, queries.results, out, partials);
}

}  // namespace
}  // namespace octavo
