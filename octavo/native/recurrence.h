// Gated DeltaNet (see octavo.h) in float32, for every level: all tokens of a row in one v head.
//
//     some tokens    convolution, SiLU, norms of q and k, decay and beta
//     each panel     some columns of the state, which stay in the L1 cache while these tokens pass, one by one
//     some tokens    norm, times silu(z)
//
// Columns of a state do not depend on each other. A pass over a panel updates it with one token, and sums both the token's result and
// S^T k for the next token. A pass that is the first one of some tokens is preceded by one that only sums. Each number is rounded in
// the same way and added in the same order in both, so no bit of a token depends on where rows or states begin and end.
#pragma once
#include "lanes.h"
#include "levels.h"

namespace octavo {
namespace {

const int64_t PASSING = 32;                            // tokens that pass a panel, before the next panel's turn
const int PANEL_LANES = PARTS == 1 ? 2 : 1;            // columns of a panel, in Lanes: as many as have room for their sums in registers
const int LONGEST_CONVOLUTION = 8;
const float LENGTH_EPS = 1e-6f;

// The sums over the rows of C * 16 columns of a panel. Even and odd rows have sums of their own, so that no addition waits for the one
// before.
template <int C> struct Sums {
    Lanes part[2][C];

    INLINE Sums() {
        for (int odd = 0; odd < 2; odd++)
            for (int c = 0; c < C; c++) part[odd][c] = zeros();
    }
    INLINE void add(int odd, int c, const Lanes &state, const Lanes &x) { part[odd][c] = multiply_add(state, x, part[odd][c]); }
    INLINE void put(float *to) const {
        for (int c = 0; c < C; c++) store(part[0][c] + part[1][c], to + c * LANE_COUNT);
    }
};

// Copies a panel, and sums S^T k.
template <int C> __attribute__((noinline)) void sum_panel(const float *from, int64_t stride, int64_t rows, const float *k, float *panel, float *sums) {
    Sums<C> made;
    for (int64_t i = 0; i < rows; i += 2, from += 2 * stride, panel += 2 * C * LANE_COUNT)
        for (int odd = 0; odd < 2; odd++) {
            const Lanes x = broadcast(k[i + odd]);
            for (int c = 0; c < C; c++) {
                const Lanes state = load(from + odd * stride + c * LANE_COUNT);
                store(state, panel + (odd * C + c) * LANE_COUNT);
                made.add(odd, c, state, x);
            }
        }
    made.put(sums);
}

struct Passing {               // a token that passes a panel
    const float *q, *k;        // [k_dim]
    const float *next_k;       // of the next token
    float decay, beta;
};

// Updates a panel with a token. v: its numbers, which are replaced by its result. sums: S^T k, replaced by that of the next token
template <int C, bool NEXT>
__attribute__((noinline)) void pass_panel(const float *panel, int64_t rows, const Passing &token, float *v, float *sums, float *to, int64_t stride) {
    const float *q = token.q, *k = token.k, *next_k = token.next_k;
    const Lanes decay = broadcast(token.decay);
    Lanes change[C];
    for (int c = 0; c < C; c++)
        change[c] = multiply_add(load(sums + c * LANE_COUNT), broadcast(-token.decay), load(v + c * LANE_COUNT)) * token.beta;
    Sums<C> results, next;
    for (int64_t i = 0; i < rows; i += 2, panel += 2 * C * LANE_COUNT, to += 2 * stride)
        for (int odd = 0; odd < 2; odd++) {
            const Lanes k_lanes = broadcast(k[i + odd]), q_lanes = broadcast(q[i + odd]), next_lanes = NEXT ? broadcast(next_k[i + odd]) : zeros();
            for (int c = 0; c < C; c++) {
                const Lanes state = multiply_add(k_lanes, change[c], load(panel + (odd * C + c) * LANE_COUNT) * decay);
                store(state, to + odd * stride + c * LANE_COUNT);
                results.add(odd, c, state, q_lanes);
                if (NEXT) next.add(odd, c, state, next_lanes);
            }
        }
    results.put(v);
    if (NEXT) next.put(sums);
}

// The functions that follow are not inlined, so that they round alike wherever they are called.

struct Convolution {
    const float *weights;      // [width][channels]: those of the first channel
    int64_t width, channels;
    int64_t tokens;
    const float *inputs[PASSING + LONGEST_CONVOLUTION - 1];  // of the last tokens before, and of the tokens
};

// The convolution of `count` channels, through SiLU. to: [tokens][count]
template <int W> __attribute__((noinline)) void convolve(const Convolution &all, int64_t count, float *to) {
    for (int64_t c = 0; c < count; c += LANE_COUNT, to += LANE_COUNT) {
        Lanes weights[W], inputs[W];
        for (int i = 0; i < W; i++) weights[i] = load(all.weights + i * all.channels + c);
        for (int i = 1; i < W; i++) inputs[i] = load(all.inputs[i - 1] + c);
        for (int64_t token = 0; token < all.tokens; token++) {
            for (int i = 1; i < W; i++) inputs[i - 1] = inputs[i];
            inputs[W - 1] = load(all.inputs[token + W - 1] + c);
            Lanes sum = weights[0] * inputs[0];
            for (int i = 1; i < W; i++) sum = multiply_add(weights[i], inputs[i], sum);
            store(silu(sum), to + token * count);
        }
    }
}

template <int W = LONGEST_CONVOLUTION> void convolve_all(const Convolution &all, int64_t count, float *to) {
    if (W > 2 && all.width < W) return convolve_all<(W > 2 ? W - 1 : 2)>(all, count, to);
    convolve<W>(all, count, to);
}

inline float squares_of(const float *x, int64_t count) {
    Lanes sum = zeros();
    for (int64_t i = 0; i < count; i += LANE_COUNT) sum = multiply_add(load(x + i), load(x + i), sum);
    return sum_of(sum);
}

__attribute__((noinline)) void scale_to_length(float *x, int64_t count, float length) {
    const float factor = length / std::sqrt(squares_of(x, count) + LENGTH_EPS);
    for (int64_t i = 0; i < count; i += LANE_COUNT) store(load(x + i) * factor, x + i);
}

__attribute__((noinline)) void norm_result(const Norm &norm, const float *z, int64_t count, float *x) {
    const float factor = 1.0f / std::sqrt(squares_of(x, count) / float(count) + norm.eps);
    for (int64_t i = 0; i < count; i += LANE_COUNT) store(load(x + i) * factor * load(norm.weight + i) * silu(load(z + i)), x + i);
}

__attribute__((noinline)) float decay_of(const DeltaNet &net, int64_t head, float a) {
    const float step = a + net.dt_bias[head];
    return fast_exp(net.decay[head] * (step > 20.0f ? step : std::log1p(fast_exp(step))));  // softplus(x) is x in float32 from there on
}

__attribute__((noinline)) float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// One v head of a row. `qkvz` and `gates` are the products of the whole step.
struct RecurrentHead {
    const DeltaNet &net;
    const Step &step;
    const Projected &qkvz;
    const float *gates;
    const Target &out;
    const int64_t row, head;
    float *memory;

    const int64_t k_dim = net.k_dim, v_dim = net.v_dim, group = net.v_heads / net.k_heads, k_head = head / group;
    const int64_t channels = 2 * net.k_heads * k_dim + net.v_heads * v_dim, before = net.conv_width - 1;
    const int64_t q_channel = k_head * k_dim, k_channel = (net.k_heads + k_head) * k_dim, v_channel = 2 * net.k_heads * k_dim + head * v_dim;
    const int64_t begin = step.query_start[row], end = step.query_start[row + 1];
    float *const state = memory;                       // [panels][k_dim][columns of a panel]
    float *const q = state + k_dim * v_dim, *const k = q + PASSING * k_dim, *const v = k + PASSING * k_dim;  // [PASSING][...]
    float *const decay = v + PASSING * v_dim, *const beta = decay + PASSING;

    void run() const {
        const int32_t *checkpoint = step.checkpoints + 2 * step.first_checkpoint[row], *last = step.checkpoints + 2 * step.first_checkpoint[row + 1];
        for (int64_t token = begin, until; token < end; token = until) {
            until = std::min(end, token + PASSING);
            if (checkpoint < last) until = std::min<int64_t>(until, checkpoint[0]);
            read_tokens(token, until);
            for (int64_t column = 0; column < v_dim;) column += pass(column, token, until);
            for (int64_t i = token; i < until; i++) write_token(i, v + (i - token) * v_dim);
            for (; checkpoint < last && checkpoint[0] == until; checkpoint += 2) store_checkpoint(checkpoint[1], until);
        }
        if (begin < end && step.state_write[row] >= 0) store_inputs(step.state_write[row], end);
    }

private:
    const float *state_of(int64_t slot) const { return net.recurrent_state + (slot * net.v_heads + head) * k_dim * v_dim; }

    // The inputs of the convolution for a head: of a token of the row, or of one of the last tokens before it.
    const float *input(int64_t channel, int64_t size, int64_t token) const {
        if (token >= begin) return qkvz.at(net, channel, size, token);
        return net.conv_state + (step.state_read[row] * before + before + token - begin) * channels + channel;
    }

    void convolve_head(int64_t channel, int64_t size, int64_t token, int64_t until, float *to) const {
        Convolution all{net.conv + channel, net.conv_width, channels, until - token, {}};
        for (int64_t i = 0; i < all.tokens + before; i++) all.inputs[i] = input(channel, size, token - before + i);
        convolve_all(all, size, to);
    }

    void read_tokens(int64_t token, int64_t until) const {
        convolve_head(q_channel, k_dim, token, until, q), convolve_head(k_channel, k_dim, token, until, k);
        convolve_head(v_channel, v_dim, token, until, v);
        for (int64_t i = 0; i < until - token; i++) {
            scale_to_length(q + i * k_dim, k_dim, 1.0f / std::sqrt(float(k_dim)));
            scale_to_length(k + i * k_dim, k_dim, 1.0f);
            const float *both = gates + (token + i) * net.gates.n;
            beta[i] = sigmoid(both[head]), decay[i] = decay_of(net, head, both[net.v_heads + head]);
        }
    }

    // Returns the number of columns.
    int64_t pass(int64_t column, int64_t token, int64_t until) const {
        if (v_dim - column >= PANEL_LANES * LANE_COUNT) return pass_tokens<PANEL_LANES>(column, token, until);
        return pass_tokens<1>(column, token, until);
    }

    template <int C> int64_t pass_tokens(int64_t column, int64_t token, int64_t until) const {
        const int64_t width = C * LANE_COUNT, slot = step.state_write[row], last = until - token - 1;
        alignas(64) float sums[C * LANE_COUNT];
        float *panel = state + column * k_dim, *values = v + column;
        if (token == begin) sum_panel<C>(state_of(step.state_read[row]) + column, v_dim, k_dim, k, panel, sums);
        else sum_panel<C>(panel, width, k_dim, k, panel, sums);
        for (int64_t i = 0; i < last; i++)
            pass_panel<C, true>(panel, k_dim, {q + i * k_dim, k + i * k_dim, k + (i + 1) * k_dim, decay[i], beta[i]}, values + i * v_dim, sums, panel,
                                width);
        const Passing ending{q + last * k_dim, k + last * k_dim, nullptr, decay[last], beta[last]};
        const bool stored = until == end && slot >= 0;  // the state of the row's last token is written once, to its slot
        float *to = stored ? const_cast<float *>(state_of(slot)) + column : panel;
        pass_panel<C, false>(panel, k_dim, ending, values + last * v_dim, sums, to, stored ? v_dim : width);
        return width;
    }

    void write_token(int64_t token, float *result) const {
        norm_result(net.norm, qkvz.at(net, channels + head * v_dim, v_dim, token), v_dim, result);
        put(result, out, token, head * v_dim, v_dim);
    }

    void store_checkpoint(int64_t slot, int64_t until) const {
        float *to = const_cast<float *>(state_of(slot));
        for (int64_t column = 0; column < v_dim;) {
            const int64_t width = v_dim - column >= PANEL_LANES * LANE_COUNT ? PANEL_LANES * LANE_COUNT : LANE_COUNT;
            for (int64_t i = 0; i < k_dim; i++) memcpy(to + i * v_dim + column, state + column * k_dim + i * width, size_t(width) * sizeof(float));
            column += width;
        }
        store_inputs(slot, until);
    }

    // Stores the last inputs of the convolution. Those of a k head are stored with the first of its v heads.
    void store_inputs(int64_t slot, int64_t until) const {
        for (int64_t i = 0; i < before; i++) {
            float *to = net.conv_state + (slot * before + i) * channels;
            auto copy = [&](int64_t channel, int64_t size) {
                memcpy(to + channel, input(channel, size, until - before + i), size_t(size) * sizeof(float));
            };
            copy(v_channel, v_dim);
            if (head % group == 0) copy(q_channel, k_dim), copy(k_channel, k_dim);
        }
    }
};

void recur_head(const DeltaNet &net, const Step &step, const Projected &qkvz, const float *gates, const Target &out, int64_t row, int64_t head,
                void *scratch) {
    RecurrentHead{net, step, qkvz, gates, out, row, head, static_cast<float *>(scratch)}.run();
}

}  // namespace
}  // namespace octavo
