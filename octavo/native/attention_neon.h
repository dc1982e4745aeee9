// Attention in float16 over float16 caches, with heads of a multiple of 16 dimensions. Shared by the levels neon and i8mm.
//
// A tile is 64 keys, read in place. Products of 32 dimensions or of 32 keys are summed in float16, and then in float32.
//
//     scores    each key times each query, which is scaled to at most 1/64, so that no key overflows;
//               the sums of 8 keys are folded into 8 lanes
//     weights   online softmax in float32, then float16
//     sums      weight times value, 16 dimensions at a time; if values are so large that a sum overflows float16, they are weighted
//               again by 1/64, which would lose precision for small values
#pragma once
#include "attention_panels.h"

namespace octavo {
namespace {

const float ROOM = 64;           // for 32 products of the largest numbers, and rounding

inline bool fits_halves(const Model &model, const Layer &layer) { return model.cache_kind == OCTAVO_F16 && layer.head_dim % LANE_COUNT == 0; }

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

// R queries times 8 keys, over D dimensions: their sums, one per lane.
template <int R, int D> INLINE void score_dimensions(const float16_t *const *keys, const float16_t *q, int64_t dim, int64_t d, float16x8_t *sums) {
    float16x8_t x[R][D / 8];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < D / 8; i++) x[r][i] = vld1q_f16(q + r * dim + d + 8 * i);
    auto one = [&](int key, float16x8_t *made) {
        for (int i = 0; i < D / 8; i++) {
            const float16x8_t numbers = vld1q_f16(keys[key] + d + 8 * i);
            for (int r = 0; r < R; r++) made[r] = i == 0 ? vmulq_f16(numbers, x[r][i]) : vfmaq_f16(made[r], numbers, x[r][i]);
        }
    };
    auto fold = [&](float16x8_t *made, const float16x8_t *next) {
        for (int r = 0; r < R; r++) made[r] = vpaddq_f16(made[r], next[r]);
    };
    auto four = [&](int key, float16x8_t *made) {
        float16x8_t second[R], third[R], fourth[R];
        one(key, made), one(key + 1, second);
        fold(made, second);
        one(key + 2, third), one(key + 3, fourth);
        fold(third, fourth);
        fold(made, third);
    };
    float16x8_t others[R];
    four(0, sums), four(4, others);
    fold(sums, others);
}

// R queries times keys [j, j + 8) of a tile.
template <int R> INLINE void score_keys(const HalfTile &tile, int64_t j, const float16_t *q, int64_t dim, float (*scores)[KEYS]) {
    float32x4_t low[R], high[R];
    for (int r = 0; r < R; r++) low[r] = high[r] = vdupq_n_f32(0);
    auto add = [&](const float16x8_t *sums) {
        for (int r = 0; r < R; r++) {
            low[r] = vaddq_f32(low[r], vcvt_f32_f16(vget_low_f16(sums[r])));
            high[r] = vaddq_f32(high[r], vcvt_high_f32_f16(sums[r]));
        }
    };
    float16x8_t sums[R];
    int64_t d = 0;
    for (; d + CARRY <= dim; d += CARRY) {
        score_dimensions<R, CARRY>(tile.keys + j, q, dim, d, sums);
        add(sums);
    }
    if (d < dim) {
        score_dimensions<R, LANE_COUNT>(tile.keys + j, q, dim, d, sums);
        add(sums);
    }
    for (int r = 0; r < R; r++) vst1q_f32(scores[r] + j, low[r]), vst1q_f32(scores[r] + j + 4, high[r]);
}

struct HalfWeights {             // of R queries, in float16: divided by `room`
    float16_t (*values)[KEYS];
    float room;
};

inline void halve_weights(const float *weights, float room, float16_t *to) {
    for (int j = 0; j < KEYS; j += 8) {
        const float32x4_t low = vmulq_n_f32(vld1q_f32(weights + j), 1 / room), high = vmulq_n_f32(vld1q_f32(weights + j + 4), 1 / room);
        vst1q_f16(to + j, vcvt_high_f16_f32(vcvt_f16_f32(low), high));
    }
}

template <int COUNT> INLINE bool all_finite(const Lanes *acc) {
    Vector check = {};
    for (int i = 0; i < COUNT; i++)
        for (int p = 0; p < PARTS; p++) check += acc[i].part[p] * 0.0f;
    return vmaxvq_f32((float32x4_t)check) == 0;  // as bits, NaN is larger than any number
}

// The weighted sum of keys [first, last), multiples of 8, for D * 16 dimensions of R queries. Returns whether the sums are finite;
// otherwise they are not changed, unless there is room already.
template <int R, int D>
INLINE bool add_values(const HalfTile &tile, int64_t first, int64_t last, int64_t d, int64_t dim, const HalfWeights &weights, const float *shrink,
                       float *sums) {
    Lanes acc[R][D];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < D; i++) acc[r][i] = load(sums + r * dim + d + i * LANE_COUNT) * shrink[r];
    for (int64_t key = first; key < last;) {
        float16x8_t made[R][2 * D] = {};
        const int64_t end = std::min(last, key / CARRY * CARRY + CARRY);
        do {
            float16x8_t numbers[R];
            for (int r = 0; r < R; r++) numbers[r] = vld1q_f16(weights.values[r] + key);
            unrolled<8>([&](auto lane) {
                for (int i = 0; i < 2 * D; i++) {
                    const float16x8_t values = vld1q_f16(tile.values[key + lane] + d + 8 * i);
                    for (int r = 0; r < R; r++) made[r][i] = multiply_add<lane>(values, numbers[r], made[r][i]);
                }
            });
            key += 8;
        } while (key < end);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < D; i++) acc[r][i] = carry(made[r] + 2 * i, weights.room, acc[r][i]);
    }
    if (weights.room == 1 && !all_finite<R * D>(acc[0])) return false;
    for (int r = 0; r < R; r++)
        for (int i = 0; i < D; i++) store(acc[r][i], sums + r * dim + d + i * LANE_COUNT);
    return true;
}

// R queries against a tile. q: [R][dim], scale: of each; sums: [R][dim]
template <int R>
void attend_tile(const HalfTile &tile, const HalfTile &next, const float16_t *q, int64_t dim, const Sight *sight, const float *scale, float cap,
                 Online *states, float *sums) {
    alignas(64) float scores[R][KEYS];
    float16_t halves[R][KEYS];
    float shrink[R];
    int64_t first, last;
    join_sights<R>(sight, first, last);
    first = first / 8 * 8, last = (last + 7) / 8 * 8;
    for (int64_t j = first; j < last; j += 8) {
        prefetch_keys(next, j, dim);
        score_keys<R>(tile, j, q, dim, scores);
    }
    for (int r = 0; r < R; r++) shrink[r] = weigh(states[r], scores[r], sight[r], scale[r], cap);
    const int D = R < 4 ? 2 : 1;  // enough independent sums that none waits for the previous one
    int64_t d = 0;
    for (float room : {1.0f, ROOM}) {
        for (int r = 0; r < R; r++) halve_weights(scores[r], room, halves[r]);
        const HalfWeights weights{halves, room};
        while (d + D * LANE_COUNT <= dim && add_values<R, D>(tile, first, last, d, dim, weights, shrink, sums)) d += D * LANE_COUNT;
        if constexpr (D > 1)
            if (d + LANE_COUNT == dim && add_values<R, 1>(tile, first, last, d, dim, weights, shrink, sums)) d = dim;
        if (d == dim) break;
    }
}

struct HalfQueries {             // the queries of a task, query by query and head by head
    float16_t *values;           // [count][dim], at most 1 / ROOM
    Results results;
    float *scale;                // [count]: scale of scores
    int64_t *positions;          // [count]
    int64_t earliest, count;     // earliest: the first position that any of them may see
};

// memory: for whole blocks of ROWS queries. Missing queries are zero.
inline HalfQueries load_queries(const Layer &layer, const Step &step, const float *qkv, const Task &task, float *memory) {
    const int64_t dim = layer.head_dim, group = layer.heads / layer.kv_heads, heads = layer.heads + 2 * layer.kv_heads, count = task.queries * group;
    const int64_t whole = (count + ROWS - 1) / ROWS * ROWS;
    float *joined = memory + whole * dim, *scales = joined + whole * dim;
    Online *states = (Online *)(scales + whole);
    HalfQueries queries{nullptr, {count, whole, dim, dim, memory, joined, states, states + whole}, scales, nullptr, INT64_MAX, count};
    queries.positions = (int64_t *)(states + 2 * whole);
    queries.values = (float16_t *)(queries.positions + whole);
    std::fill(queries.scale + count, queries.scale + whole, 0.0f);
    std::fill(queries.positions + count, queries.positions + whole, -1);
    std::fill(queries.values + count * dim, queries.values + whole * dim, float16_t(0));
    for (int64_t i = 0; i < count; i++) {
        const float *q = qkv + (task.token_of(i / group) * heads + task.kv_head * group + i % group) * dim;
        const float scale = power_above(largest_of(q, dim)) * ROOM;
        for (int64_t d = 0; d < dim; d += LANE_COUNT) store_f16(load(q + d) * (1 / scale), (uint16_t *)queries.values + i * dim + d);
        queries.scale[i] = scale * layer.attention_scale;
        queries.positions[i] = step.cache_index[task.token_of(i / group)];
        queries.earliest = std::min(queries.earliest, first_seen(layer, queries.positions[i]));
    }
    return queries;
}

// Queries against the keys of a row, through its block table.
void attend_halves(const Model &model, const Layer &layer, const Step &step, const float *qkv, const Target &out, float *partials, const Task &task,
                   void *scratch) {
    if (!fits_halves(model, layer)) return attend_floats(model, layer, step, qkv, out, partials, task, scratch);
    const int64_t dim = layer.head_dim, group = layer.heads / layer.kv_heads;
    const int32_t *table = table_of(layer, step, task.row);
    float *memory = (float *)scratch;
    std::fill(memory, memory + dim, 0.0f);  // a missing key
    const PanelTile panels{(float16_t *)(memory + dim), (float16_t *)(memory + dim) + KEYS * dim};
    const HalfQueries queries = load_queries(layer, step, qkv, task, memory + dim + KEYS * dim);
    HalfTile tile, next, none;
    next.count = none.count = 0;
    auto attend = [&](int64_t begin, int64_t from) {
        auto find = [&](int64_t begin, int64_t from, HalfTile &tile) {
            find_tile(layer, table, task.kv_head, begin, from, task.end, (const float16_t *)memory, tile);
        };
        if (next.count == 0) {
            find(begin, from, next);
            for (int64_t j = 0; j < next.count && queries.count < MANY; j += 8) prefetch_keys(next, j, dim);  // only small batches would wait for the keys
        }
        tile = next;
        find(begin + KEYS, begin + KEYS, next);
        const bool many = queries.count >= MANY && dim <= MOST_SPANS * CHAIN && lay_out(tile.keys, tile.values, dim, panels);
        const int64_t at_once = many ? ROWS : QUERIES_AT_ONCE;
        for (int64_t i = 0; i < queries.count; i += at_once) {
            const int64_t rows = many ? at_once : std::min(at_once, queries.count - i);
            Sight sights[ROWS];
            for (int64_t r = 0; r < rows; r++) {
                const int64_t position = queries.positions[i + r], head = task.kv_head * group + (i + r) % group;
                sights[r] = position < 0 ? Sight{KEYS, 0, 0, 0} : sight_of(layer, head, position, begin, tile.count);  // a missing query sees nothing
            }
            const Sight *sight = sights;
            const float16_t *q = queries.values + i * dim;
            const float *scale = queries.scale + i;
            Online *states = queries.results.states + i;
            float *sums = queries.results.sums + i * dim;
            if (many) {
                if (i < KEYS) prefetch_keys(next, i, dim);
                attend_panels(panels, q, dim, sight, scale, layer.soft_cap, states, sums);
            } else {
                attend_rows<QUERIES_AT_ONCE>(rows, tile, i == 0 ? next : none, q, dim, sight, scale, layer.soft_cap, states, sums);
            }
        }
    };
    by_pieces(task, queries.results, queries.earliest, partials, attend, [] {});
    finish(layer, task, queries.results, out, partials);
}

}  // namespace
}  // namespace octavo
