// One step of a decoder: every thread walks through all layers, with a barrier wherever it needs results of the others.
//
//     embed -> [ norm -> qkv -> write k, v -> attend -> output -> norm -> gate, up -> down ] x layers -> norm -> logits -> argmax
//
// A layer may have a norm after a sub-layer, too, or only there, an MoE in place of gate, up and down, products of latents around
// attention, and Gated DeltaNet in place of attention. In a parallel layer attention and MLP read the same normed input, and both results are added.
//
// Work is divided into pieces that threads take dynamically: tokens, panels of weights, attention tasks. A core that
// is slower than the others, or busy, takes fewer. The result of a piece does not depend on the thread that computes it.
//
// If ranks share the model, each does so with its own part of the weights. They communicate after `output` and after `down`, to sum
// their partial results, and after the embedding if each has only some rows. A stage of a pipeline starts with the stream of the
// previous stage, or ends with the stream for the next one.
#include <cstring>
#include <utility>
#include <vector>

#include "attend.h"
#include "delta_net.h"
#include "latent.h"
#include "mixture.h"
#include "scalar.h"

namespace octavo {

static RowBuffer normed_, made_;  // results of norms; results of attention and gates
static RowBuffer beside_;         // results of norms for a second product: the MLP of a parallel layer, the gates of Gated DeltaNet
static Buffer stream_, qkv_, gates_, attended_, gated_, added_, parallel_;
static std::vector<Buffer> scratch_;

// Private buffers of a thread in a small batch: the stream, a row of a sub-layer's output, and prepared rows.
struct Own {
    Buffer stream, row;
    RowBuffer normed, made, beside;

    void match(const Own &other) {
        stream.match(other.stream), row.match(other.row);
        normed.match(other.normed), made.match(other.made), beside.match(other.beside);
    }
};
static std::vector<Own> own_;

void work(const std::function<void(Worker &)> &body) {
    Worker::start();
    together([&](int thread) {
        Worker worker{thread};
        body(worker);
    });
}

void *scratch(int thread) { return scratch_[thread].get<char>(SCRATCH_BYTES); }
void make_scratch(int threads) {
    scratch_.resize(threads), own_.resize(threads);
    for (int thread = 0; thread < threads; thread++) scratch(thread);
}

void multiply_all(const Matrix &matrix, const float *x, float *y, int64_t count, int64_t tokens) {
    if (!count) return;
    Rows rows = normed_.get(matrix, count, tokens);
    work([&](Worker &me) {
        prepare(matrix, {const_cast<float *>(x), nullptr, matrix.k}, rows, me);
        multiply(matrix, rows, y, matrix.n, me);
    });
}

void gate_up_all(const Matrix &matrix, int activation, const float *x, float *y, int64_t count, int64_t tokens) {
    if (!count) return;
    Rows rows = normed_.get(matrix, count, tokens);
    work([&](Worker &me) {
        prepare(matrix, {const_cast<float *>(x), nullptr, matrix.k}, rows, me);
        gate_up(matrix, activation, rows, {y, nullptr, activated(matrix, activation)}, me);
    });
}

static int64_t vocab_rows(const Model &model) { return model.vocab_rows ? model.vocab_rows : model.vocab; }

// A row that another rank has is zero here.
static void embed(const Model &model, const Step &step, float *stream, int64_t token) {
    int64_t id = step.token_ids[token] - model.vocab_start, size = model.hidden;
    float *to = stream + token * size;
    if (id < 0 || id >= vocab_rows(model)) {
        std::fill(to, to + size, 0.0f);
    } else if (model.embed_kind == OCTAVO_F32) {
        memcpy(to, static_cast<const float *>(model.embed) + id * size, size * sizeof(float));
    } else if (model.embed_kind == OCTAVO_BF16 || model.embed_kind == OCTAVO_F16) {
        const uint16_t *from = static_cast<const uint16_t *>(model.embed) + id * size;
        for (int64_t i = 0; i < size; i++) to[i] = model.embed_kind == OCTAVO_BF16 ? bf16_to_float(from[i]) : f16_to_float(from[i]);
    } else {
        unpack_row(model.head, id, to);
    }
    if (model.embedding_scale != 1)
        for (int64_t i = 0; i < size; i++) to[i] *= model.embedding_scale;
}

// The communication with other ranks during a step.
struct Peers {
    const Group *group;
    int code = 0;

    // Sums an array over all ranks, in place. Returns false, on every thread, if that failed: the step ends here.
    bool sum(float *values, int64_t count, Worker &me) {
        if (!group) return true;
        if (me.thread == 0) code = octavo_reduce(group, values, count);
        pool().barrier();
        return code == 0;
    }
};

static const int64_t LOGITS = 1024;  // minimum size of a piece

static bool caps(const Model &model) { return model.logit_scale != 1 || model.logit_cap > 0; }

static void cap_logits(const Model &model, float *logits, int64_t count, Worker &me) {
    me.deal(count, LOGITS, [&](int64_t begin, int64_t end) { kernels().cap(logits + begin, model.logit_scale, model.logit_cap, end - begin); });
}

void cap_all(const Model &model, float *logits, int64_t count) {
    if (caps(model)) work([&](Worker &me) { cap_logits(model, logits, count, me); });
}

// Layers may differ, so buffers get the largest size before threads start: they must not grow while they are in use, nor on another
// thread.
struct StepBuffers {
    float *stream, *added, *attended, *gated;
    float *qkv;                 // or the results of `qkvz`
    float *gates = nullptr;     // results of `gates` of Gated DeltaNet
    float *parallel = nullptr;  // [tokens][hidden], results of the MLP of parallel layers

    StepBuffers(const Model &model, const Step &step) {
        const int64_t tokens = step.num_tokens;
        int64_t widest = 1, queries = 1, inner = 1, gated_heads = 0;
        make_scratch(pool().threads());
        for (const Layer *layer = model.layers; layer < model.layers + model.num_layers; layer++) {
            const Matrix &first = first_of(*layer);
            widest = std::max<int64_t>(widest, layer->latent ? read_heads(*layer) * layer->head_dim : first.n);
            if (layer->latent) reserve_latent(*layer, tokens);
            queries = std::max<int64_t>(queries, layer->output.k);
            reserve_rows(first, layer->output, tokens);
            if (layer->mixture) reserve_mixture(*layer->mixture, tokens);
            else {
                inner = std::max(inner, layer->down.k);
                reserve_rows(layer->gate_up, layer->down, tokens);
            }
            if (layer->parallel) {
                parallel = parallel_.get<float>(tokens * model.hidden);
                reserve_beside(layer->gate_up, tokens);
            }
            if (layer->delta_net) {
                gated_heads = std::max<int64_t>(gated_heads, layer->delta_net->gates.n);
                reserve_beside(layer->delta_net->gates, tokens);
            }
        }
        if (step.num_samples && !step.passed) normed_.get(model.head, step.num_samples, tokens);
        stream = stream_.get<float>(tokens * model.hidden), added = added_.get<float>(tokens * model.hidden);
        qkv = qkv_.get<float>(tokens * widest), attended = attended_.get<float>(tokens * queries), gated = gated_.get<float>(tokens * inner);
        if (gated_heads) gates = gates_.get<float>(tokens * gated_heads);
        if (tokens > TOKENS) return;
        own_[0].stream.get<float>(tokens * model.hidden), own_[0].row.get<float>(model.hidden);
        for (Own &own : own_) own.match(own_[0]);
    }

    // The product of a layer's input.
    static const Matrix &first_of(const Layer &layer) {
        return layer.delta_net ? layer.delta_net->qkvz : layer.latent ? layer.latent->down : layer.qkv;
    }

private:
    // Rows of the two products of a sub-layer.
    static void reserve_rows(const Matrix &first, const Matrix &last, int64_t tokens) {
        normed_.get(first, tokens, tokens), made_.get(last, tokens, tokens);
        if (tokens <= TOKENS) own_[0].normed.get(first, tokens, tokens), own_[0].made.get(last, tokens, tokens);
    }
    static void reserve_beside(const Matrix &matrix, int64_t tokens) {
        beside_.get(matrix, tokens, tokens);
        if (tokens <= TOKENS) own_[0].beside.get(matrix, tokens, tokens);
    }
};

// The residual stream of a step, and the pending output of the last sub-layer.
struct Stream {
    const Model &model;
    float *values, *added;          // [tokens][hidden]
    bool pending = false;           // whether an output is pending
    const Norm *after = nullptr;    // the norm of that output
    float scale = 1;                // factor on that output
    float *copy = nullptr;          // memory for a row of that output, if other threads read it, too

    // Sets the pending output of a sub-layer.
    void give(const Norm &after_norm, float residual_scale) { pending = true, after = &after_norm, scale = residual_scale; }

    // Adds the pending output of a token. y: the sum, normed; or unchanged, if there is no norm
    void norm(int64_t token, const Norm &norm, float *y) const {
        float *row = pending ? settled(added + token * model.hidden) : nullptr;
        kernels().add_norm(values + token * model.hidden, row, norm, y, model.hidden);
    }

private:
    float *settled(float *row) const {
        if (!after->weight && scale == 1) return row;
        if (copy) row = std::copy(row, row + model.hidden, copy) - model.hidden;
        if (after->weight) kernels().add_norm(row, nullptr, *after, row, model.hidden);
        if (scale != 1)
            for (int64_t i = 0; i < model.hidden; i++) row[i] *= scale;
        return row;
    }
};

// A thread's way through the layers of a step. In a small batch each thread computes norms and prepared rows for itself, instead of
// waiting for one thread to do it. Each then has its own stream, and no synchronisation is needed.
struct Walk {
    const Model &model;
    const Step &step;
    const StepTasks &tasks;
    const StepBuffers &at;
    Peers &peers;
    float *partials;
    Worker &me;
    Stream stream{model, at.stream, at.added};
    const int64_t tokens = step.num_tokens, size = model.hidden;
    const bool few = tokens <= TOKENS;
    Own &own = own_[me.thread];

    template <class Run> void each_token(Run run) {
        me.deal(tokens, TOKENS, [&](int64_t token, int64_t end) {
            for (; token < end; token++) run(token);
        });
    }

    // For data that every thread needs: in a small batch each thread computes all of it.
    template <class Run> void all_tokens(Run run) {
        if (!few) return each_token(run);
        for (int64_t token = 0; token < tokens; token++) run(token);
    }

    bool begin() {
        each_token([&](int64_t token) {
            if (step.received) memcpy(at.stream + token * size, step.received + token * size, size_t(size) * sizeof(float));
            else embed(model, step, at.stream, token);
        });
        if (!step.received && vocab_rows(model) < model.vocab && !peers.sum(at.stream, tokens * size, me)) return false;
        if (!step.received && model.embedding_norm.weight)
            each_token([&](int64_t token) {
                float *row = at.stream + token * size;
                kernels().add_norm(row, nullptr, model.embedding_norm, row, size);
            });
        if (few) {
            stream.values = own.stream.get<float>(tokens * size), stream.copy = own.row.get<float>(size);
            std::copy(at.stream, at.stream + tokens * size, stream.values);
        }
        return true;
    }

    // Returns false if communication between ranks failed.
    bool through(int64_t index) {
        const Layer &layer = model.layers[index];
        if (layer.parallel) {
            both_tokens(index);
        } else {
            if (layer.delta_net) recur_tokens(layer);
            else if (layer.latent) attend_latents(index, norm_rows(layer.attention_norm, layer.latent->down));
            else attend_tokens(index, norm_rows(layer.attention_norm, layer.qkv));
            if (!peers.sum(at.added, tokens * size, me)) return false;
            stream.give(layer.attention_after_norm, layer.residual_scale);
            if (layer.mixture) mix_tokens(layer);
            else gate_tokens(layer, norm_rows(layer.mlp_norm, layer.gate_up), at.added);
        }
        stream.give(layer.mlp_after_norm, layer.residual_scale);
        return peers.sum(at.added, tokens * size, me);
    }

    void pass_on() {
        each_token([&](int64_t token) { stream.norm(token, {}, step.passed + token * size); });
    }

    void finish() {
        const int64_t vocab = vocab_rows(model), samples = step.num_samples;
        each_token([&](int64_t token) { stream.norm(token, model.norm, step.hidden + token * size); });
        if (samples == 0) return;
        Rows rows = normed_.get(model.head, samples, tokens);
        me.deal(samples, 1, [&](int64_t i, int64_t end) {
            for (; i < end; i++) kernels().prepare(model.head, step.hidden + step.sample_index[i] * size, rows, i);
        });
        multiply(model.head, rows, step.logits, vocab, me);
        if (caps(model)) cap_logits(model, step.logits, samples * vocab, me);
        me.deal(samples, 1, [&](int64_t i, int64_t end) {
            for (; i < end; i++) step.best[i] = model.vocab_start + kernels().argmax(step.logits + i * vocab, vocab);
        });
    }

private:
    Rows norm_rows(const Norm &norm, const Matrix &matrix) {
        const Rows rows = (few ? own.normed : normed_).get(matrix, tokens, tokens);
        float *row = static_cast<float *>(scratch(me.thread));
        all_tokens([&](int64_t token) {
            stream.norm(token, norm, row);
            kernels().prepare(matrix, row, rows, token);
        });
        return rows;
    }

    // The rows of two products of the same normed input.
    std::pair<Rows, Rows> norm_rows(const Norm &norm, const Matrix &matrix, const Matrix &other) {
        const Rows rows = (few ? own.normed : normed_).get(matrix, tokens, tokens);
        const Rows beside = (few ? own.beside : beside_).get(other, tokens, tokens);
        float *row = static_cast<float *>(scratch(me.thread));
        all_tokens([&](int64_t token) {
            stream.norm(token, norm, row);
            kernels().prepare(matrix, row, rows, token);
            kernels().prepare(other, row, beside, token);
        });
        return {rows, beside};
    }

    // Attention and MLP of a parallel layer. Their sum is the pending output; of ranks, the sum of both partial results.
    void both_tokens(int64_t index) {
        const Layer &layer = model.layers[index];
        const auto [rows, beside] = norm_rows(layer.attention_norm, layer.qkv, layer.gate_up);
        attend_tokens(index, rows);
        gate_tokens(layer, beside, at.parallel);
        each_token([&](int64_t token) {
            for (int64_t i = token * size; i < (token + 1) * size; i++) at.added[i] += at.parallel[i];
        });
    }

    void attend_tokens(int64_t index, const Rows &normed) {
        const Layer &layer = model.layers[index];
        multiply(layer.qkv, normed, at.qkv, layer.qkv.n, me);
        each_token([&](int64_t token) { kernels().write(model, layer, step, at.qkv, token); });
        const Rows rows = made_.get(layer.output, tokens, tokens);
        const Target made = target_of(layer.output, rows, at.attended);
        attend(model, layer, step, tasks.of(index), at.qkv, made, partials, me);
        multiply(layer.output, ready(layer.output, made, rows), at.added, size, me);
    }

    void attend_latents(int64_t index, const Rows &normed) {
        const Layer &layer = model.layers[index];
        float *down = latent_down(layer, tokens), *latents = latent_results(layer, tokens);
        multiply(layer.latent->down, normed, down, layer.latent->down.n, me);
        absorb(layer, down, at.qkv, tokens, me);
        each_token([&](int64_t token) { kernels().write(model, layer, step, at.qkv, token); });
        attend(model, layer, step, tasks.of(index), at.qkv, {latents, nullptr, layer.heads * value_dim(layer)}, partials, me);
        expand(layer, latents, at.attended, tokens, me);
        const Rows rows = made_.get(layer.output, tokens, tokens);
        multiply(layer.output, ready(layer.output, {at.attended, nullptr, layer.output.k}, rows), at.added, size, me);
    }

    void recur_tokens(const Layer &layer) {
        const DeltaNet &net = *layer.delta_net;
        const auto [normed, beside] = norm_rows(layer.attention_norm, net.qkvz, net.gates);
        const Projected qkvz = project(net, normed, at.qkv, beside, at.gates, me);
        const Rows rows = made_.get(layer.output, tokens, tokens);
        const Target made = target_of(layer.output, rows, at.attended);
        recur(net, step, qkvz, at.gates, made, me);
        multiply(layer.output, ready(layer.output, made, rows), at.added, size, me);
    }

    // Returns the rows in the format of a product. shared: the rows that `made` may have been written to directly
    Rows ready(const Matrix &matrix, const Target &made, const Rows &shared) {
        if (!few || made.halves) {
            prepare(matrix, made, shared, me);
            return shared;
        }
        const Rows rows = own.made.get(matrix, tokens, tokens);
        all_tokens([&](int64_t token) { kernels().prepare(matrix, made.values + token * matrix.k, rows, token); });
        return rows;
    }

    void gate_tokens(const Layer &layer, const Rows &normed, float *y) {
        const Rows rows = made_.get(layer.down, tokens, tokens);
        const Target made = target_of(layer.down, rows, at.gated);
        gate_up(layer.gate_up, layer.activation, normed, made, me);
        multiply(layer.down, ready(layer.down, made, rows), y, size, me);
    }

    void mix_tokens(const Layer &layer) {
        float *row = static_cast<float *>(scratch(me.thread));
        all_tokens([&](int64_t token) {
            stream.norm(token, layer.mlp_norm, row);
            if (!few || me.thread == 0) take_token(*layer.mixture, tokens, token, row);
        });
        if (few) pool().barrier();
        mix(*layer.mixture, layer.activation, tokens, at.added, me);
    }
};

int run_step(const Model &model, const Step &step) {
    const StepBuffers buffers(model, step);
    const StepTasks tasks(model, step);
    float *partials = partials_for(tasks);
    Peers peers{model.group};
    work([&](Worker &me) {
        Walk walk{model, step, tasks, buffers, peers, partials, me};
        bool met = walk.begin();
        for (int64_t index = 0; met && index < model.num_layers; index++) met = walk.through(index);
        if (!met) return;
        if (step.passed) walk.pass_on();
        else walk.finish();
    });
    return peers.code;
}

}  // namespace octavo
