// The kernels that every level has, in plain C++ and Lanes. Each level includes this file, compiles it with its own flags, and replaces
// kernels by faster ones. All of it is in an unnamed namespace: code compiled for one level must never be used by another.
#pragma once
#include "attention.h"
#include "recurrence.h"
#include "sampling.h"

namespace octavo {
namespace {

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

inline float sum(const float *a, int64_t size) {
    float lanes[16] = {};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int n = 0; n < 16; n++) lanes[n] += a[i + n];
    float total = 0;
    for (int n = 0; n < 16; n++) total += lanes[n];
    for (; i < size; i++) total += a[i];
    return total;
}

// y may be x.
void norm_row(const float *x, const Norm &norm, float *y, int64_t size) {
    if (norm.kind == OCTAVO_LAYER_NORM) {
        const float mean = sum(x, size) / float(size);
        for (int64_t i = 0; i < size; i++) y[i] = x[i] - mean;
        x = y;
    }
    float factor = 1.0f / std::sqrt(dot(x, x, size) / float(size) + norm.eps);
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * factor * norm.weight[i];
    if (norm.bias)
        for (int64_t i = 0; i < size; i++) y[i] += norm.bias[i];
}

// stream += x; y = the stream, normed. Without x, the stream is unchanged; without a norm, y is the stream.
void add_norm_generic(float *stream, const float *x, const Norm &norm, float *y, int64_t size) {
    if (x)
        for (int64_t i = 0; i < size; i++) stream[i] += x[i];
    if (norm.weight) norm_row(stream, norm, y, size);
    else if (y != stream) memcpy(y, stream, size_t(size) * sizeof(float));
}

void rotate(float *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cos[i] - high * sin[i];
        head[i + half] = high * cos[i] + low * sin[i];
    }
}

void cap_values(float *values, float scale, float cap, int64_t count) {
    for (int64_t i = 0; i < count; i += LANE_COUNT) {
        const Lanes scaled = load_some(values + i, count - i) * scale;
        store_some(cap > 0 ? capped(scaled, cap) : scaled, values + i, count - i);
    }
}

void store_head(const Model &model, const Layer &layer, const float *head, void *cache, float *scales, int64_t slot, int64_t kv_head) {
    int64_t dim = layer.head_dim, place = (slot * cached_heads(layer) + kv_head) * dim;
    if (model.cache_kind == OCTAVO_F32) {
        memcpy((float *)cache + place, head, dim * sizeof(float));
    } else if (model.cache_kind == OCTAVO_BF16) {
        for (int64_t i = 0; i < dim; i++) ((uint16_t *)cache)[place + i] = float_to_bf16(head[i]);
    } else if (model.cache_kind == OCTAVO_F16) {
        uint16_t halves[LANE_COUNT];
        for (int64_t i = 0; i < dim; i += LANE_COUNT) {
            store_f16(load_some(head + i, dim - i), halves);
            memcpy((uint16_t *)cache + place + i, halves, size_t(std::min<int64_t>(LANE_COUNT, dim - i)) * 2);
        }
    } else {
        float largest = largest_of(head, dim);
        float inverse = largest > 0 ? 127 / largest : 0.0f;
        for (int64_t i = 0; i < dim; i++) ((int8_t *)cache)[place + i] = int8_t(nearbyintf(head[i] * inverse));
        scales[slot * cached_heads(layer) + kv_head] = largest / 127;
    }
}

// Norms the latent of a token, rotates the ends of its q heads and of its key, in place, and stores the key in the cache.
void write_latent(const Model &model, const Layer &layer, const Step &step, float *qkv, int64_t token) {
    const int64_t dim = layer.head_dim, half = layer.rotary_dim / 2, latent = value_dim(layer), position = step.positions[token];
    float *heads = qkv + token * read_heads(layer) * dim, *key = heads + layer.heads * dim;
    add_norm_generic(key, nullptr, layer.k_norm, key, latent);
    for (float *head = heads; head <= key; head += dim) rotate(head + latent, layer.cos + position * half, layer.sin + position * half, half);
    store_head(model, layer, key, layer.k_cache, layer.k_scale, step.slots[layer.cache_group * step.slot_stride + token], 0);
}

// Norms and rotates the q and k heads of a token, in place, and stores its k and v in the cache.
void write_generic(const Model &model, const Layer &layer, const Step &step, float *qkv, int64_t token) {
    if (layer.latent) return write_latent(model, layer, step, qkv, token);
    const int64_t dim = layer.head_dim, half = layer.rotary_dim / 2, slot = step.slots[layer.cache_group * step.slot_stride + token];
    const int64_t position = step.positions[token];
    float *heads = qkv + token * read_heads(layer) * dim, *keys = heads + layer.heads * dim, *values = keys + layer.kv_heads * dim;
    if (layer.whole_norm) {
        add_norm_generic(heads, nullptr, layer.q_norm, heads, layer.heads * dim);
        add_norm_generic(keys, nullptr, layer.k_norm, keys, layer.kv_heads * dim);
    }
    for (int64_t h = 0; h < layer.heads + layer.kv_heads; h++) {
        float *head = heads + h * dim;
        const Norm &norm = h < layer.heads ? layer.q_norm : layer.k_norm;
        if (!layer.whole_norm) add_norm_generic(head, nullptr, norm, head, dim);
        if (half) rotate(head, layer.cos + position * half, layer.sin + position * half, half);
    }
    for (int64_t h = 0; h < layer.kv_heads; h++) {
        store_head(model, layer, keys + h * dim, layer.k_cache, layer.k_scale, slot, h);
        store_head(model, layer, values + h * dim, layer.v_cache, layer.v_scale, slot, h);
    }
}

// Returns the first index of the largest value; 0 if none is larger than -infinity.
int64_t argmax(const float *values, int64_t count) {
    Lanes most = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + LANE_COUNT <= count; i += LANE_COUNT) most = larger(most, load(values + i));
    float largest = largest_in(most);
    for (; i < count; i++) largest = values[i] > largest ? values[i] : largest;
    for (i = 0; i < count; i++)
        if (values[i] == largest) return i;
    return 0;
}

// All but the products.
void fill_generic(Kernels &kernels) {
    kernels.add_norm = add_norm_generic;
    kernels.cap = cap_values;
    kernels.write = write_generic;
    kernels.attend = attend_floats;
    kernels.delta_net = recur_head;
    kernels.argmax = argmax;
    kernels.uniform = uniform_row<philox>;
    kernels.draw = draw_row<philox>;
    kernels.rank = rank_generic;
}

}  // namespace
}  // namespace octavo
