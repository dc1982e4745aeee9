// Every kernel in plain C++, written so that compilers vectorise it: inner loops run over the 16 rows of a panel, or along
// contiguous values. Each level includes this file and compiles it with its own flags; what it does better by hand it replaces.
// All of it is in an unnamed namespace: code compiled for one level must never serve another.
#pragma once
#include <algorithm>
#include <cstring>

#include "levels.h"
#include "sampling.h"
#include "scalar.h"

namespace octavo {
namespace {

const int P = OCTAVO_PANEL;

// --- products ----------------------------------------------------------------------------------------------------------

// Few rows go through codes of 8 bits, many through bfloat16; without instructions for bfloat16, codes do for all.
Form form_generic(const Matrix &matrix, int64_t) {
    return matrix.kind == OCTAVO_F32 ? Form::FLOAT : matrix.kind == OCTAVO_BF16 ? Form::BF16 : Form::INT8;
}

inline float column(const Matrix &matrix, const float *x, int64_t k) { return x[matrix.order ? matrix.order[k] : k]; }

// The largest of |values|, compared as bits: infinity and NaN, which no code could say, are larger than any number.
inline float largest_of(const float *values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, float_to_bits(values[i]) & 0x7fffffff);
    return bits_to_float(largest);
}

void quantize_group(const Matrix &matrix, const float *x, int64_t begin, int64_t size, int8_t *codes, float &scale, float &sum) {
    float values[128];
    for (int64_t i = 0; i < matrix.group; i++) values[i] = begin + i < size ? column(matrix, x, begin + i) : 0.0f;
    float largest = largest_of(values, matrix.group);
    scale = largest / 127;
    float inverse = largest > 0 ? 127 / largest : 0.0f;
    int total = 0;
    for (int64_t i = 0; i < matrix.group; i++) {
        int code = int(nearbyintf(values[i] * inverse));
        codes[i] = int8_t(code);
        total += code;
    }
    sum = scale * float(total);
}

// A row of x in the form `rows` asks for.
void prepare_generic(const Matrix &matrix, const float *x, const Rows &rows, int64_t row) {
    const int64_t size = matrix.k;
    if (rows.form == Form::FLOAT) {
        float *to = rows.values + row * rows.stride;
        for (int64_t k = 0; k < size; k++) to[k] = column(matrix, x, k);
        std::fill(to + size, to + rows.stride, 0.0f);
    } else if (rows.form == Form::BF16) {
        uint16_t *to = rows.halves + row * rows.stride;
        for (int64_t k = 0; k < size; k++) to[k] = float_to_bf16(column(matrix, x, k));
        std::fill(to + size, to + rows.stride, uint16_t(0));
    } else {
        int64_t groups = rows.stride / matrix.group;
        for (int64_t g = 0; g < groups; g++)
            quantize_group(matrix, x, g * matrix.group, size, rows.codes + row * rows.stride + g * matrix.group, rows.scale[row * groups + g],
                           rows.sum[row * groups + g]);
    }
}

// One row of x times one panel: 16 sums.
void dot_float(const Matrix &matrix, const Rows &rows, int64_t row, int64_t panel, float *sums) {
    const float *w = (const float *)matrix.data + panel * rows.stride * P, *x = rows.values + row * rows.stride;
    for (int64_t k = 0; k < rows.stride; k++)
        for (int n = 0; n < P; n++) sums[n] += x[k] * w[k * P + n];
}

void dot_bf16(const Matrix &matrix, const Rows &rows, int64_t row, int64_t panel, float *sums) {
    const uint16_t *w = (const uint16_t *)matrix.data + panel * rows.stride * P, *x = rows.halves + row * rows.stride;
    for (int64_t k = 0; k < rows.stride; k += 2) {
        float first = bf16_to_float(x[k]), second = bf16_to_float(x[k + 1]);
        for (int n = 0; n < P; n++) sums[n] += first * bf16_to_float(w[(k * P) + 2 * n]) + second * bf16_to_float(w[k * P + 2 * n + 1]);
    }
}

// Where the codes of k (a multiple of 4) stand, and how far they are shifted.
inline const uint8_t *quad(const Matrix &matrix, int64_t stride, int64_t panel, int64_t k, int &shift) {
    if (matrix.kind == OCTAVO_Q8) {
        shift = 0;
        return (const uint8_t *)matrix.data + (panel * stride + k) * P;
    }
    shift = k & 4;
    return (const uint8_t *)matrix.data + (panel * stride + (k & ~7)) * P / 2;
}

void dot_codes(const Matrix &matrix, const Rows &rows, int64_t row, int64_t panel, float *sums) {
    int64_t groups = rows.stride / matrix.group;
    int mask = matrix.kind == OCTAVO_Q8 ? 255 : 15;
    for (int64_t g = 0; g < groups; g++) {
        int32_t total[P] = {};
        for (int64_t k = g * matrix.group; k < (g + 1) * matrix.group; k += 4) {
            int shift;
            const uint8_t *w = quad(matrix, rows.stride, panel, k, shift);
            const int8_t *x = rows.codes + row * rows.stride + k;
            for (int n = 0; n < P; n++)
                for (int i = 0; i < 4; i++) total[n] += int(w[4 * n + i] >> shift & mask) * x[i];
        }
        int64_t place = (panel * groups + g) * P;
        float scale = rows.scale[row * groups + g] * matrix.factor, sum = rows.sum[row * groups + g] * matrix.factor;
        for (int n = 0; n < P; n++) sums[n] += f16_to_float(matrix.scale[place + n]) * scale * float(total[n]) + f16_to_float(matrix.offset[place + n]) * sum;
    }
}

void dot_generic(const Matrix &matrix, const Rows &rows, int64_t row, int64_t panel, float *sums) {
    for (int n = 0; n < P; n++) sums[n] = matrix.bias && panel * P + n < matrix.n ? matrix.bias[panel * P + n] : 0.0f;
    if (rows.form == Form::FLOAT) dot_float(matrix, rows, row, panel, sums);
    else if (rows.form == Form::BF16) dot_bf16(matrix, rows, row, panel, sums);
    else dot_codes(matrix, rows, row, panel, sums);
}

// y[row][n] for the rows n of panels [panel, end).
void product_generic(const Matrix &matrix, const Rows &rows, int64_t panel, int64_t end, float *y, int64_t stride, void *) {
    for (; panel < end; panel++)
        for (int64_t row = 0; row < rows.rows; row++) {
            float sums[P];
            dot_generic(matrix, rows, row, panel, sums);
            memcpy(y + row * stride + panel * P, sums, size_t(std::min<int64_t>(P, matrix.n - panel * P)) * sizeof(float));
        }
}

// y[row][n] = silu(gate) * up for pairs of panels: the first of each pair is gate, the second up.
void gate_up_generic(const Matrix &matrix, const Rows &rows, int64_t pair, int64_t end, const Target &y, void *) {
    for (; pair < end; pair++)
        for (int64_t row = 0; row < rows.rows; row++) {
            float gate[P], up[P];
            dot_generic(matrix, rows, row, 2 * pair, gate);
            dot_generic(matrix, rows, row, 2 * pair + 1, up);
            for (int n = 0; n < P; n++) up[n] *= silu(gate[n]);
            put(up, y, row, pair * P, std::min<int64_t>(P, matrix.n / 2 - pair * P));
        }
}

// --- between products --------------------------------------------------------------------------------------------------

inline float dot(const float *a, const float *b, int64_t size) {
    float lanes[16] = {};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int n = 0; n < 16; n++) lanes[n] += a[i + n] * b[i + n];
    float total = 0;
    for (int n = 0; n < 16; n++) total += lanes[n];
    for (; i < size; i++) total += a[i] * b[i];
    return total;
}

// stream += x; y = stream / rms(stream) * weight. Without x, the stream is as it is.
void add_rms_norm_generic(float *stream, const float *x, const float *weight, float eps, float *y, int64_t size) {
    if (x)
        for (int64_t i = 0; i < size; i++) stream[i] += x[i];
    float factor = 1.0f / std::sqrt(dot(stream, stream, size) / float(size) + eps);
    for (int64_t i = 0; i < size; i++) y[i] = stream[i] * factor * weight[i];
}

void rotate(float *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cos[i] - high * sin[i];
        head[i + half] = high * cos[i] + low * sin[i];
    }
}

void store_head(const Model &model, const float *head, void *cache, float *scales, int64_t slot, int64_t kv_head) {
    int64_t dim = model.head_dim, place = (slot * model.kv_heads + kv_head) * dim;
    if (model.cache_kind == OCTAVO_F32) {
        memcpy((float *)cache + place, head, dim * sizeof(float));
    } else if (model.cache_kind == OCTAVO_BF16) {
        for (int64_t i = 0; i < dim; i++) ((uint16_t *)cache)[place + i] = float_to_bf16(head[i]);
    } else {
        float largest = largest_of(head, dim);
        float inverse = largest > 0 ? 127 / largest : 0.0f;
        for (int64_t i = 0; i < dim; i++) ((int8_t *)cache)[place + i] = int8_t(nearbyintf(head[i] * inverse));
        scales[slot * model.kv_heads + kv_head] = largest / 127;
    }
}

// Norms and rotates the q and k heads of a token, in place, and stores its k and v in the cache.
void write_generic(const Model &model, const Layer &layer, const Step &step, float *qkv, int64_t token) {
    int64_t dim = model.head_dim, half = dim / 2, slot = step.slots[token];
    float *heads = qkv + token * (model.heads + 2 * model.kv_heads) * dim;
    const float *cos = model.cos + step.positions[token] * half, *sin = model.sin + step.positions[token] * half;
    for (int64_t h = 0; h < model.heads + model.kv_heads; h++) {
        float *head = heads + h * dim;
        const float *norm = h < model.heads ? layer.q_norm : layer.k_norm;
        if (norm) add_rms_norm_generic(head, nullptr, norm, model.eps, head, dim);
        rotate(head, cos, sin, half);
    }
    for (int64_t h = 0; h < model.kv_heads; h++) {
        store_head(model, heads + (model.heads + h) * dim, layer.k_cache, layer.k_scale, slot, h);
        store_head(model, heads + (model.heads + model.kv_heads + h) * dim, layer.v_cache, layer.v_scale, slot, h);
    }
}

// --- attention ---------------------------------------------------------------------------------------------------------

const int KEYS = 64;  // looked at together

inline void load_head(const Model &model, const void *cache, const float *scales, int64_t slot, int64_t kv_head, float *head) {
    int64_t dim = model.head_dim, place = (slot * model.kv_heads + kv_head) * dim;
    if (model.cache_kind == OCTAVO_F32) {
        memcpy(head, (const float *)cache + place, dim * sizeof(float));
    } else if (model.cache_kind == OCTAVO_BF16) {
        for (int64_t i = 0; i < dim; i++) head[i] = bf16_to_float(((const uint16_t *)cache)[place + i]);
    } else {
        float scale = scales[slot * model.kv_heads + kv_head];
        for (int64_t i = 0; i < dim; i++) head[i] = float(((const int8_t *)cache)[place + i]) * scale;
    }
}

struct Slots {  // of a row's positions, one after the other, through its block table
    const int64_t *block;
    int64_t size, at;

    Slots(const int64_t *table, int64_t block_size, int64_t position) : block(table + position / block_size), size(block_size), at(position % block_size) {}
    int64_t next() {
        int64_t slot = *block * size + at;
        if (++at == size) at = 0, block++;
        return slot;
    }
};

struct Online {  // softmax over keys that come a few at a time: the largest score so far, and the sum of weights relative to it
    float largest, total;
};

// New scores become weights; what was summed before is scaled down to the new largest score.
inline void weigh(Online &state, float *scores, int64_t count, float *out, int64_t dim) {
    float largest = state.largest;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, scores[i]);
    if (largest == -INFINITY) {  // nothing seen yet
        std::fill(scores, scores + count, 0.0f);
        return;
    }
    float shrink = state.largest == -INFINITY ? 0.0f : fast_exp(state.largest - largest), total = 0;
    for (int64_t i = 0; i < count; i++) scores[i] = fast_exp(scores[i] - largest);
    for (int64_t i = 0; i < count; i++) total += scores[i];
    for (int64_t i = 0; i < dim; i++) out[i] *= shrink;
    state = {largest, state.total * shrink + total};
}

// First position a query at `position` may see.
inline int64_t first_seen(const Layer &layer, int64_t position) { return layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0; }

// A task's result: the weighted values divided by their total; or, for a part of the context, undivided with both numbers behind.
inline void finish(const Model &model, const Task &task, const Online &state, float *sums, int64_t query, int64_t head, const Target &out,
                   float *partials) {
    int64_t dim = model.head_dim, group = model.heads / model.kv_heads;
    if (task.partial < 0) {
        float inverse = 1.0f / state.total;
        for (int64_t i = 0; i < dim; i++) sums[i] *= inverse;
        return put(sums, out, task.token + query, (task.kv_head * group + head) * dim, dim);
    }
    float *to = partials + (task.partial + query * group + head) * (dim + 2);
    memcpy(to, sums, dim * sizeof(float));
    to[dim] = state.largest;
    to[dim + 1] = state.total;
}

// Queries of one row against its context, through the block table. scratch: keys and values of a tile, scores, sums.
void attend_generic(const Model &model, const Layer &layer, const Step &step, const float *qkv, const Target &out, float *partials,
                    const Task &task, void *scratch) {
    int64_t dim = model.head_dim, group = model.heads / model.kv_heads, heads = model.heads + 2 * model.kv_heads;
    const int64_t *table = step.tables + task.row * step.table_width;
    float *keys = (float *)scratch, *values = keys + KEYS * dim, *sums = values + KEYS * dim;
    Online *states = (Online *)(sums + task.queries * group * dim);
    std::fill(sums, sums + task.queries * group * dim, 0.0f);
    for (int64_t i = 0; i < task.queries * group; i++) states[i] = {-INFINITY, 0.0f};
    for (int64_t begin = task.begin; begin < task.end; begin += KEYS) {
        int64_t count = std::min<int64_t>(KEYS, task.end - begin);
        Slots slots(table, model.block_size, begin);
        for (int64_t i = 0; i < count; i++) {
            int64_t slot = slots.next();
            load_head(model, layer.k_cache, layer.k_scale, slot, task.kv_head, keys + i * dim);
            load_head(model, layer.v_cache, layer.v_scale, slot, task.kv_head, values + i * dim);
        }
        for (int64_t query = 0; query < task.queries; query++) {
            int64_t position = step.positions[task.token + query], low = std::max(begin, first_seen(layer, position)) - begin;
            int64_t high = std::min(count, position + 1 - begin);
            for (int64_t head = 0; head < group && low < high; head++) {
                const float *q = qkv + ((task.token + query) * heads + task.kv_head * group + head) * dim;
                float scores[KEYS], *sum = sums + (query * group + head) * dim;
                for (int64_t i = low; i < high; i++) scores[i] = dot(q, keys + i * dim, dim) * model.attention_scale;
                weigh(states[query * group + head], scores + low, high - low, sum, dim);
                for (int64_t i = low; i < high; i++)
                    for (int64_t d = 0; d < dim; d++) sum[d] += scores[i] * values[i * dim + d];
            }
        }
    }
    for (int64_t i = 0; i < task.queries * group; i++) finish(model, task, states[i], sums + i * dim, i / group, i % group, out, partials);
}

int64_t argmax_generic(const float *values, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (values[i] > values[best]) best = i;
    return best;
}

void fill_generic(Kernels &kernels) {
    kernels.form = form_generic;
    kernels.prepare = prepare_generic;
    kernels.product = product_generic;
    kernels.gate_up = gate_up_generic;
    kernels.add_rms_norm = add_rms_norm_generic;
    kernels.write = write_generic;
    kernels.attend = attend_generic;
    kernels.argmax = argmax_generic;
    kernels.uniform = uniform_row<philox>;
    kernels.draw = draw_row<philox>;
    kernels.rank = rank_generic;
}

}  // namespace
}  // namespace octavo
