// The products around latent attention: each head has a matrix of its own before and after it.
#include "latent.h"

#include <cstring>

#include "stack.h"

namespace octavo {

static RowBuffer read_, plain_, weighted_;  // rows of q_up, k_up and v_up; of the last two head by head
static Buffer down_, q_, results_;

static int64_t head_size(const Layer &layer) { return layer.latent->plain_dim + layer.rotary_dim; }  // of q as it is projected

// All buffers of a step. Each call returns the same memory.
static Rows read_rows(const Latent &latent, int64_t tokens) { return read_.get(latent.q_up, tokens, tokens); }
static Rows plain_rows(const Layer &layer, int64_t tokens) { return whole_blocks(plain_, layer.latent->k_up, tokens * layer.heads, tokens); }
static Rows weighted_rows(const Layer &layer, int64_t tokens) { return whole_blocks(weighted_, layer.latent->v_up, tokens * layer.heads, tokens); }
static float *q_of(const Latent &latent, int64_t tokens) { return q_.get<float>(tokens * latent.q_up.n); }
float *latent_down(const Layer &layer, int64_t tokens) { return down_.get<float>(tokens * layer.latent->down.n); }
float *latent_results(const Layer &layer, int64_t tokens) { return results_.get<float>(tokens * layer.heads * value_dim(layer)); }

void reserve_latent(const Layer &layer, int64_t tokens) {
    const Latent &latent = *layer.latent;
    if (latent.q_up.n) read_rows(latent, tokens), q_of(latent, tokens);
    plain_rows(layer, tokens), weighted_rows(layer, tokens);
    latent_down(layer, tokens), latent_results(layer, tokens);
}

// Calls run(token, head) for all of them.
template <class Run> static void each_head(const Layer &layer, int64_t tokens, Worker &me, Run run) {
    me.deal(tokens * layer.heads, TOKENS, [&](int64_t at, int64_t end) {
        for (; at < end; at++) run(at / layer.heads, at % layer.heads);
    });
}

// Multiplies the rows of each head by its matrix, which has n rows. y: of the first head; the next one is `size` numbers behind it
static void multiply_heads(const Layer &layer, const Matrix &all, const Rows &rows, int64_t tokens, int64_t n, float *y, int64_t size, int64_t stride,
                           Worker &me) {
    const int64_t each = panels(n);
    me.deal(layer.heads * each, PANELS, [&](int64_t panel, int64_t end) {
        for (int64_t until; panel < end; panel = until) {
            const int64_t head = panel / each, first = head * each;
            until = std::min(end, first + each);
            kernels().product(part_of(all, head, layer.heads, n), some_rows(all, rows, head * tokens, tokens), panel - first, until - first,
                              y + head * size, stride, scratch(me.thread));
        }
    });
}

void absorb(const Layer &layer, const float *down, float *qkv, int64_t tokens, Worker &me) {
    const Latent &latent = *layer.latent;
    const int64_t dim = layer.head_dim, size = head_size(layer), row = read_heads(layer) * dim, width = latent.down.n;
    const float *q = down;
    int64_t q_width = width;
    if (latent.q_up.n) {
        const Rows rows = read_rows(latent, tokens);
        float *normed = static_cast<float *>(scratch(me.thread));
        me.deal(tokens, 1, [&](int64_t token, int64_t end) {
            for (; token < end; token++) {
                memcpy(normed, down + token * width, size_t(latent.q_up.k) * sizeof(float));
                kernels().add_norm(normed, nullptr, layer.q_norm, normed, latent.q_up.k);
                kernels().prepare(latent.q_up, normed, rows, token);
            }
        });
        multiply(latent.q_up, rows, q_of(latent, tokens), latent.q_up.n, me);
        q = q_of(latent, tokens), q_width = latent.q_up.n;
    }
    const Rows plain = plain_rows(layer, tokens);
    each_head(layer, tokens, me, [&](int64_t token, int64_t head) {
        const float *from = q + token * q_width + head * size;
        kernels().prepare(latent.k_up, from, plain, head * tokens + token);
        memcpy(qkv + token * row + head * dim + value_dim(layer), from + latent.plain_dim, size_t(layer.rotary_dim) * sizeof(float));
        if (head == 0) memcpy(qkv + token * row + layer.heads * dim, down + (token + 1) * width - dim, size_t(dim) * sizeof(float));
    });
    multiply_heads(layer, latent.k_up, plain, tokens, value_dim(layer), qkv, dim, row, me);
}

void expand(const Layer &layer, const float *latents, float *out, int64_t tokens, Worker &me) {
    const Latent &latent = *layer.latent;
    const Rows rows = weighted_rows(layer, tokens);
    each_head(layer, tokens, me, [&](int64_t token, int64_t head) {
        kernels().prepare(latent.v_up, latents + (token * layer.heads + head) * value_dim(layer), rows, head * tokens + token);
    });
    multiply_heads(layer, latent.v_up, rows, tokens, latent.value_dim, out, latent.value_dim, int64_t(layer.heads) * latent.value_dim, me);
}

void absorb_all(const Layer &layer, const float *down, float *qkv, int64_t tokens) {
    if (!tokens) return;
    reserve_latent(layer, tokens);
    work([&](Worker &me) { absorb(layer, down, qkv, tokens, me); });
}

void expand_all(const Layer &layer, const float *latents, float *out, int64_t tokens) {
    if (!tokens) return;
    reserve_latent(layer, tokens);
    work([&](Worker &me) { expand(layer, latents, out, tokens, me); });
}

}  // namespace octavo
