// Attention over caches of every format, in float32, for every level.
//
// A tile is 64 keys of one kv head. Keys and values are converted to floats once for all queries of a task, unless they are floats.
// Heads are padded with zeros to multiples of 16 dimensions.
//
//     scores    each key times each query; the sums of 16 keys are folded into 16 lanes
//     weights   online softmax: exp(score - largest so far), after the layer's cap on scores or its ALiBi, if any
//     sums      weight times value, 16 dimensions at a time
//
// Tiles begin at multiples of 64, and the softmax begins again with each piece, so that no number of a query depends on the keys that
// other queries see.
#pragma once
#include "products.h"

namespace octavo {
namespace {

const int KEYS = 64;             // processed together
static_assert(PIECE % KEYS == 0);
const int AHEAD = 8;             // keys prefetched: they are in pieces too small for the hardware prefetcher
const int QUERIES_AT_ONCE = 4;   // their sums stay in registers

struct Slots {  // iterates over the slots of a row's positions, through its block table
    const int32_t *block;
    int64_t size, at;

    Slots(const int32_t *table, int64_t block_size, int64_t position) : block(table + position / block_size), size(block_size), at(position % block_size) {}
    int64_t next() {
        int64_t slot = int64_t(*block) * size + at;
        if (++at == size) at = 0, block++;
        return slot;
    }
};

struct Online {  // online softmax: the largest score so far, and the sum of weights relative to it
    float largest, total;
};

inline const int32_t *table_of(const Layer &layer, const Step &step, int64_t row) {
    return step.tables + layer.cache_group * step.table_stride + row * step.table_width;
}

// Adds the result over the keys that follow: `sums` with `other`. Not inlined: the compiler could round other sums differently.
__attribute__((noinline)) void join(const float *sums, Online other, int64_t dim, float *joined, Online &state) {
    if (other.largest == -INFINITY) return;  // no keys
    if (state.largest == -INFINITY) {
        memcpy(joined, sums, size_t(dim) * sizeof(float));
        state = other;
        return;
    }
    const float largest = std::max(state.largest, other.largest);
    const float before = fast_exp(state.largest - largest), after = fast_exp(other.largest - largest);
    for (int64_t i = 0; i < dim; i++) joined[i] = joined[i] * before + sums[i] * after;
    state = {largest, state.total * before + other.total * after};
}

// The results of a task, query by query and head by head: over the keys of a piece, and over all keys before it.
struct Results {
    int64_t count, room;               // room: of the first `sums` and `states`; more than the queries if a kernel processes whole blocks
    int64_t dim, width;                // width: from one query to the next in `sums`
    float *sums, *joined;              // [room][width], [count][dim]
    Online *states, *joined_states;
};

inline float *partial_of(const Task &task, const Results &results, float *partials, int64_t piece, int64_t i) {
    return partials + (task.partial + piece * results.count + i) * (results.dim + 2);
}

inline void store_partial(const float *sums, Online state, int64_t dim, float *to) {
    memcpy(to, sums, size_t(dim) * sizeof(float));
    to[dim] = state.largest;
    to[dim + 1] = state.total;
}

// A task without partial results begins with those over the keys before it.
inline void start(const Task &task, const Results &results, const float *partials) {
    for (int64_t i = 0; i < results.count; i++) {
        results.joined_states[i] = {-INFINITY, 0.0f};
        for (int64_t part = 0; part < task.parts; part++) {
            const float *from = partials + (task.places[part] + i) * (results.dim + 2);
            join(from, {from[results.dim], from[results.dim + 1]}, results.dim, results.joined + i * results.dim, results.joined_states[i]);
        }
    }
}

inline void end_piece(const Task &task, const Results &results, int64_t piece, float *partials) {
    for (int64_t i = 0; i < results.count; i++) {
        const float *sums = results.sums + i * results.width;
        if (task.by_piece()) store_partial(sums, results.states[i], results.dim, partial_of(task, results, partials, piece, i));
        else join(sums, results.states[i], results.dim, results.joined + i * results.dim, results.joined_states[i]);
    }
}

// Multiplies a head by the sigmoid of its gate. Not inlined, so that it rounds alike in every kernel.
__attribute__((noinline)) void apply_gate(float *head, const float *gate, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANE_COUNT)
        store_some(by_sigmoid(load_some(head + d, dim - d), load_some(gate + d, dim - d)), head + d, dim - d);
}

// Stores the final result: the weighted values divided by their total, times the sigmoid of the gate, if there is one. Or the partial
// result over all keys.
inline void finish(const Layer &layer, const Task &task, const float *qkv, const Results &results, const Target &out, float *partials) {
    if (task.by_piece()) return;  // its results are stored
    const int64_t dim = results.dim, group = layer.heads / layer.kv_heads;
    for (int64_t i = 0; i < results.count; i++) {
        float *joined = results.joined + i * dim;
        const Online state = results.joined_states[i];
        const int64_t head = task.kv_head * group + i % group;
        if (task.partial >= 0) store_partial(joined, state, dim, partial_of(task, results, partials, 0, i));
        else {
            const float inverse = 1.0f / with_sink(layer, head, state.largest, state.total);
            const int64_t token = task.token_of(i / group), heads = read_heads(layer);
            for (int64_t d = 0; d < dim; d++) joined[d] *= inverse;
            if (layer.output_gate) apply_gate(joined, qkv + (token * heads + heads - layer.heads + head) * dim, dim);
            put(joined, out, token, head * dim, dim);
        }
    }
}

// Calls tile(begin, from) for every tile of the task's keys: keys from `begin` on, of which those from `from` on can be seen. Calls
// collect() before the results of a piece are read. earliest: the first position that any query may see
template <class Tile, class Collect>
void by_pieces(const Task &task, const Results &results, int64_t earliest, float *partials, Tile tile, Collect collect) {
    const int64_t first = std::max(task.begin, earliest);
    start(task, results, partials);
    for (int64_t begin = task.begin, piece = 0; begin < task.end; begin += PIECE, piece++) {
        const int64_t from = std::max(begin, first / KEYS * KEYS), end = std::min(task.end, begin + PIECE);
        std::fill(results.sums, results.sums + results.room * results.width, 0.0f);
        std::fill(results.states, results.states + results.room, Online{-INFINITY, 0.0f});
        for (int64_t at = from; at < end; at += KEYS) tile(at, std::max(at, first));
        collect();
        end_piece(task, results, piece, partials);
    }
}

inline int64_t whole_lanes(int64_t dim) { return (dim + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT; }
inline int64_t cache_item(const Model &model) { return model.cache_kind == OCTAVO_F32 ? 4 : model.cache_kind == OCTAVO_Q8 ? 1 : 2; }

// Loads a head from the cache as floats, with zeros up to `width`.
inline void load_head(const Model &model, int64_t dim, const void *from, float scale, int64_t width, float *to) {
    const int64_t whole = dim / LANE_COUNT * LANE_COUNT;
    auto each = [&](auto *values, auto load16, auto one) {
        for (int64_t d = 0; d < whole; d += LANE_COUNT) store(load16(values + d), to + d);
        for (int64_t d = whole; d < width; d++) to[d] = d < dim ? one(values[d]) : 0.0f;
    };
    if (model.cache_kind == OCTAVO_F32) each((const float *)from, [](const float *v) { return load(v); }, [](float v) { return v; });
    else if (model.cache_kind == OCTAVO_BF16) each((const uint16_t *)from, [](const uint16_t *v) { return load_bf16(v); }, bf16_to_float);
    else if (model.cache_kind == OCTAVO_F16) each((const uint16_t *)from, [](const uint16_t *v) { return load_f16(v); }, f16_to_float);
    else each((const int8_t *)from, [=](const int8_t *v) { return load_int8(v) * scale; }, [=](int8_t v) { return float(v) * scale; });
}

struct FloatTile {  // 64 keys of one kv head
    const float *keys[KEYS], *values[KEYS];
    int64_t count;
};

// Loads the keys [from, end) of a row that are in the tile from `begin` on, through its block table. The first numbers of a key with a latent
// are its value. memory: [2][KEYS][width]
inline void load_tile(const Model &model, const Layer &layer, const int32_t *table, int64_t kv_head, int64_t begin, int64_t from, int64_t end,
                      int64_t width, float *memory, FloatTile &tile) {
    const int64_t bytes = layer.head_dim * cache_item(model);
    const bool in_place = model.cache_kind == OCTAVO_F32 && width == layer.head_dim, scaled = model.cache_kind == OCTAVO_Q8;
    int64_t head[KEYS];  // indices into the cache
    Slots slots(table, layer.block_size, from);
    const int64_t first = from - begin;
    tile.count = std::min<int64_t>(KEYS, end - begin);
    for (int64_t i = first; i < tile.count; i++) {
        head[i] = slots.next() * cached_heads(layer) + (layer.latent ? 0 : kv_head);
        tile.keys[i] = in_place ? (const float *)layer.k_cache + head[i] * width : memory + i * width;
        tile.values[i] = layer.latent ? tile.keys[i] : in_place ? (const float *)layer.v_cache + head[i] * width : memory + (KEYS + i) * width;
    }
    auto skip = [&](int64_t i) { tile.keys[i] = tile.keys[first], tile.values[i] = tile.values[first]; };  // any valid key: its weight is 0
    for (int64_t i = 0; i < first; i++) skip(i);
    for (int64_t i = tile.count; i < KEYS; i++) skip(i);
    auto place = [&](const void *cache, int64_t i) { return (const char *)cache + head[i] * bytes; };
    for (int64_t i = first; i < tile.count && !in_place; i++) {
        for (int64_t at = 0; i + AHEAD < tile.count && at < bytes; at += 64) {
            __builtin_prefetch(place(layer.k_cache, i + AHEAD) + at);
            if (!layer.latent) __builtin_prefetch(place(layer.v_cache, i + AHEAD) + at);
        }
        load_head(model, layer.head_dim, place(layer.k_cache, i), scaled ? layer.k_scale[head[i]] : 1.0f, width, memory + i * width);
        if (!layer.latent) load_head(model, layer.head_dim, place(layer.v_cache, i), scaled ? layer.v_scale[head[i]] : 1.0f, width, memory + (KEYS + i) * width);
    }
}

// How a query sees a tile.
struct Sight {
    int64_t low, high;       // it sees keys [low, high)
    float slope, distance;   // of ALiBi: slope * (distance + i) is added to the score of key i; slope 0: nothing is
};

inline Sight sight_of(const Layer &layer, int64_t head, int64_t position, int64_t begin, int64_t count) {
    return {std::max<int64_t>(0, first_seen(layer, position) - begin), std::min(count, position + 1 - begin), slope_of(layer, head),
            float(begin - position)};
}

// The keys that any of R queries sees.
template <int R> inline void join_sights(const Sight *sight, int64_t &first, int64_t &last) {
    first = KEYS, last = 0;
    for (int r = 0; r < R; r++) first = std::min(first, sight[r].low), last = std::max(last, sight[r].high);
}

inline Lanes counted() {  // 0, 1, 2, ...
    alignas(64) static const float numbers[LANE_COUNT] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}

// Adds ALiBi to the scaled scores of a tile, in place.
inline void add_distances(float *scores, const Sight &sight, float scale) {
    for (int j = 0; j < KEYS; j += LANE_COUNT) {
        const Lanes distance = counted() + broadcast(sight.distance + float(j));
        store(multiply_add(load(scores + j), broadcast(scale), distance * sight.slope), scores + j);
    }
}

// Converts scores of one query against a tile to weights, and updates the largest score and the total. Keys that it does not see get
// weight 0. Returns the factor by which earlier sums shrink. cap: of the scaled scores, or 0
inline float weigh(Online &state, float *scores, const Sight &sight, float scale, float cap) {
    const int64_t low = sight.low, high = sight.high;
    if (low >= high) {
        std::fill(scores, scores + KEYS, 0.0f);
        return 1.0f;
    }
    auto fill_unseen = [&](float value) {
        std::fill(scores, scores + low, value);
        std::fill(scores + high, scores + KEYS, value);
    };
    if (cap > 0) {
        for (int j = 0; j < KEYS; j += LANE_COUNT) store(capped(load(scores + j) * scale, cap), scores + j);
        scale = 1;
    }
    if (sight.slope != 0) {
        add_distances(scores, sight, scale);
        scale = 1;
    }
    fill_unseen(-INFINITY);
    Lanes most = broadcast(state.largest);
    for (int j = 0; j < KEYS; j += LANE_COUNT) {
        Lanes score = load(scores + j) * scale;
        store(score, scores + j);
        most = larger(most, score);
    }
    const float largest = largest_in(most);
    for (int j = 0; j < KEYS; j += LANE_COUNT) store(power<true>((load(scores + j) - broadcast(largest)) * LOG2_E), scores + j);
    fill_unseen(0.0f);
    Lanes total = zeros();
    for (int j = 0; j < KEYS; j += LANE_COUNT) total = total + load(scores + j);
    const float shrink = state.largest == largest ? 1.0f : state.largest == -INFINITY ? 0.0f : fast_exp(state.largest - largest);
    state = {largest, multiply_add(state.total, shrink, sum_of(total))};
    return shrink;
}

// R queries times keys [j, j + 16) of a tile.
template <int R> inline void score_keys(const FloatTile &tile, int j, const float *q, int64_t width, float (*scores)[KEYS]) {
    Vector made[R][LANE_COUNT];
    for (int i = 0; i < LANE_COUNT; i += 2) {
        const float *key = tile.keys[j + i], *next = tile.keys[j + i + 1];
        Vector first[R] = {}, second[R] = {};
        for (int64_t d = 0; d < width; d += WIDTH) {
            const Vector a = load_vector(key + d), b = load_vector(next + d);
            for (int r = 0; r < R; r++) {
                const Vector x = load_vector(q + r * width + d);
                first[r] = multiply_add(a, x, first[r]);
                second[r] = multiply_add(b, x, second[r]);
            }
        }
        for (int r = 0; r < R; r++) made[r][i] = first[r], made[r][i + 1] = second[r];
    }
    for (int r = 0; r < R; r++) store(sums_of(made[r]), scores[r] + j);
}

// The weighted sum of keys [low, high), for D * 16 dimensions of R queries.
template <int R, int D>
inline void add_values(const FloatTile &tile, int64_t low, int64_t high, int64_t d, int64_t width, const float (*weights)[KEYS], const float *shrink,
                       float *sums) {
    Lanes acc[R][D];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < D; i++) acc[r][i] = load(sums + r * width + d + i * LANE_COUNT) * shrink[r];
    for (int64_t key = low; key < high; key++)
        for (int i = 0; i < D; i++) {
            const Lanes value = load(tile.values[key] + d + i * LANE_COUNT);
            for (int r = 0; r < R; r++) acc[r][i] = multiply_add(value, broadcast(weights[r][key]), acc[r][i]);
        }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < D; i++) store(acc[r][i], sums + r * width + d + i * LANE_COUNT);
}

// R queries against a tile. q: [R][width]; sums: [R][value_width]. Not inlined: in one function with all R, the compiler would unroll less.
template <int R>
__attribute__((noinline)) void attend_tile(const FloatTile &tile, const float *q, int64_t width, int64_t value_width, const Sight *sight, float scale, float cap,
                                           Online *states, float *sums) {
    alignas(64) float scores[R][KEYS];
    float shrink[R];
    int64_t first, last;
    join_sights<R>(sight, first, last);
    for (int j = 0; j < last; j += LANE_COUNT) score_keys<R>(tile, j, q, width, scores);
    for (int r = 0; r < R; r++) shrink[r] = weigh(states[r], scores[r], sight[r], scale, cap);
    const int D = PARTS == 1 ? 2 : 1;  // enough independent sums that none waits for the previous one
    int64_t d = 0;
    for (; d + D * LANE_COUNT <= value_width; d += D * LANE_COUNT) add_values<R, D>(tile, first, last, d, value_width, scores, shrink, sums);
    for (; d < value_width; d += LANE_COUNT) add_values<R, 1>(tile, first, last, d, value_width, scores, shrink, sums);
}

template <int R, class... Arguments> inline void attend_rows(int64_t rows, const Arguments &...arguments) {
    if constexpr (R > 1)
        if (rows < R) return attend_rows<R - 1>(rows, arguments...);
    attend_tile<R>(arguments...);
}

// Queries against the keys of a row, through its block table. scratch: a tile; queries and results of the task.
void attend_floats(const Model &model, const Layer &layer, const Step &step, const float *qkv, const Target &out, float *partials, const Task &task,
                   void *scratch) {
    const int64_t dim = layer.head_dim, values = value_dim(layer), group = layer.heads / layer.kv_heads, heads = read_heads(layer);
    const int64_t width = whole_lanes(dim), value_width = whole_lanes(values), count = task.queries * group;
    const int32_t *table = table_of(layer, step, task.row);
    float *memory = (float *)scratch, *queries = memory + 2 * KEYS * width, *sums = queries + count * width, *joined = sums + count * value_width;
    Online *states = (Online *)(joined + count * value_width);
    const Results results{count, count, values, value_width, sums, joined, states, states + count};
    int64_t earliest = INT64_MAX;
    for (int64_t i = 0; i < count; i++) {
        const float *q = qkv + (task.token_of(i / group) * heads + task.kv_head * group + i % group) * dim;
        for (int64_t d = 0; d < width; d++) queries[i * width + d] = d < dim ? q[d] : 0.0f;
        earliest = std::min(earliest, first_seen(layer, step.cache_index[task.token_of(i / group)]));
    }
    auto attend = [&](int64_t begin, int64_t from) {
        FloatTile tile;
        load_tile(model, layer, table, task.kv_head, begin, from, task.end, width, memory, tile);
        for (int64_t i = 0; i < count; i += QUERIES_AT_ONCE) {
            Sight sight[QUERIES_AT_ONCE];
            const int64_t rows = std::min<int64_t>(QUERIES_AT_ONCE, count - i);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t position = step.cache_index[task.token_of((i + r) / group)], head = task.kv_head * group + (i + r) % group;
                sight[r] = sight_of(layer, head, position, begin, tile.count);
            }
            attend_rows<QUERIES_AT_ONCE>(rows, tile, queries + i * width, width, value_width, (const Sight *)sight, layer.attention_scale,
                                         layer.soft_cap, states + i, sums + i * value_width);
        }
    };
    by_pieces(task, results, earliest, partials, attend, [] {});
    finish(layer, task, qkv, results, out, partials);
}

}  // namespace
}  // namespace octavo
