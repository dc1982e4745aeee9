// One step of a decoder: every thread walks through all layers, with a barrier wherever it needs what the others made.
//
//     embed -> [ norm -> qkv -> write k, v -> attend -> output -> norm -> gate, up -> down ] x layers -> norm -> logits -> argmax
//
// Work is dealt out in pieces that threads take as they get done: tokens, panels of weights, tasks of attention. A core that
// is slower than the others, or busy with something else, takes fewer. Who computes a piece makes no difference to it.
//
// Where the model is shared by ranks, each does so with its own part of the weights. They meet after `output` and after `down`, to sum
// what each has of them, and after the embedding if each has rows of its own. A stage of a pipeline begins with the stream of the stage
// before it, or ends with the stream that the next one begins with.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "dispatch.h"
#include "pool.h"
#include "scalar.h"

namespace octavo {

static const int64_t QUERIES = 64;     // of one task: they share every key they load
static const int64_t LEAST_KEYS = 256; // of a part of a context: less is not worth merging
static const int64_t LEAST_SHARED = 64; // keys that rows have in common, to be read once for all

// Memory that grows and is kept from step to step.
class Buffer {
public:
    template <class T> T *get(int64_t count) {
        size_t bytes = (size_t(count) * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > bytes_) {
            memory_.reset(static_cast<char *>(std::aligned_alloc(4096, bytes)));
            bytes_ = bytes;
        }
        return reinterpret_cast<T *>(memory_.get());
    }

private:
    struct Free {
        void operator()(char *memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory_;
    size_t bytes_ = 0;
};

// Rows prepared for a product. How they are multiplied depends on the tokens of their step: the vocabulary of a prompt's last
// token is worth as much care as the prompt.
struct RowBuffer {
    Buffer values, scale, sum;

    Rows get(const Matrix &matrix, int64_t count, int64_t tokens) {
        Rows rows{};
        rows.form = kernels().form(matrix, tokens);
        rows.rows = count;
        rows.stride = padded(matrix);
        void *memory = values.get<float>((count + 31) / 32 * 32 * rows.stride);  // tiles read whole blocks of rows
        rows.values = static_cast<float *>(memory);
        rows.halves = static_cast<uint16_t *>(memory);
        rows.codes = static_cast<int8_t *>(memory);
        const int64_t spans = count * (rows.stride / span_of(matrix));
        if (rows.form == Form::INT8 || rows.form == Form::HALF) rows.scale = scale.get<float>(spans);
        if (rows.form == Form::INT8) rows.sum = sum.get<float>(spans);
        return rows;
    }
};

static RowBuffer normed_, made_;  // what norms give; what attention and gates give
static Buffer stream_, qkv_, attended_, gated_, added_, partials_;
static std::vector<Buffer> scratch_;

// A thread on its way through a step. All threads go through the same phases; every phase ends when its work is done.
struct Worker {
    int thread;
    int64_t phase = 0;

    // work(begin, end) for pieces of [0, count), in multiples of `unit`: large ones first, so that all get done at once.
    template <class Work> void deal(int64_t count, int64_t unit, Work work) {
        std::atomic<int64_t> &next = next_[phase % 3];
        if (thread == 0) next_[(phase + 1) % 3].store(0, std::memory_order_relaxed);  // nobody has used it since the phase before last
        for (int64_t begin = next.load(std::memory_order_relaxed); begin < count;) {
            int64_t size = std::max<int64_t>(1, (count - begin) / (2 * pool().threads() * unit)) * unit, end = std::min(count, begin + size);
            if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            work(begin, end);
            begin = next.load(std::memory_order_relaxed);
        }
        phase++;
        pool().barrier();
    }

    static void start() {
        for (auto &next : next_) next.store(0, std::memory_order_relaxed);
    }

private:
    static inline std::atomic<int64_t> next_[3];
};

static void work(const std::function<void(Worker &)> &body) {
    Worker::start();
    together([&](int thread) {
        Worker worker{thread};
        body(worker);
    });
}

void *scratch(int thread) { return scratch_[thread].get<char>(SCRATCH_BYTES); }
void make_scratch(int threads) { scratch_.resize(threads); }

// Where results go that are rows of the next product: to the place it reads, if bfloat16 is all that makes them ready.
static Target target_of(const Matrix &matrix, const Rows &rows, float *values) {
    bool straight = rows.form == Form::BF16 && !matrix.order && rows.stride == matrix.k;
    return {values, straight ? rows.halves : nullptr, matrix.k};
}

static const int64_t TOKENS = 8;  // at least, of a piece
static const int64_t PANELS = 2;

// Makes rows ready that are still floats.
static void prepare(const Matrix &matrix, const Target &made, const Rows &rows, Worker &me) {
    if (made.halves) return;
    me.deal(rows.rows, TOKENS, [&](int64_t row, int64_t end) {
        for (; row < end; row++) kernels().prepare(matrix, made.values + row * matrix.k, rows, row);
    });
}

static void multiply(const Matrix &matrix, const Rows &rows, float *y, int64_t stride, Worker &me) {
    me.deal(panels(matrix.n), PANELS, [&](int64_t panel, int64_t end) {
        kernels().product(matrix, rows, panel, end, y, stride, scratch(me.thread));
    });
}

static void gate_up(const Matrix &matrix, const Rows &rows, const Target &y, Worker &me) {
    me.deal(panels(matrix.n / 2), PANELS / 2, [&](int64_t pair, int64_t end) {
        kernels().gate_up(matrix, rows, pair, end, y, scratch(me.thread));
    });
}

void multiply_all(const Matrix &matrix, const float *x, float *y, int64_t count, int64_t tokens, bool gated) {
    if (!count) return;
    Rows rows = normed_.get(matrix, count, tokens);
    work([&](Worker &me) {
        prepare(matrix, {const_cast<float *>(x), nullptr, matrix.k}, rows, me);
        if (gated) gate_up(matrix, rows, {y, nullptr, matrix.n / 2}, me);
        else multiply(matrix, rows, y, matrix.n, me);
    });
}

// --- attention ---------------------------------------------------------------------------------------------------------

struct Merge {  // parts of one context that have to become one
    int64_t token, queries, kv_head, partial, parts;
};

struct Tasks {
    std::vector<Task> tasks;
    std::vector<Merge> merges;
    int64_t partials = 0;
};

static int64_t queries_of(const Step &step, int64_t row) { return step.query_start[row + 1] - step.query_start[row]; }

struct Run {  // rows of one token each, one behind the other, whose contexts begin with the same blocks
    int64_t rows, shared;
};

// The run from `row` on that saves most: a row joins if the keys that need not be read again do not become fewer by it.
static Run run_from(const Step &step, int64_t row) {
    Run run{1, INT64_MAX};
    while (step.shared && row + run.rows < step.num_rows && queries_of(step, row) == 1 && queries_of(step, row + run.rows) == 1) {
        int64_t next = row + run.rows, shared = std::min<int64_t>({run.shared, step.shared[next], step.context_len[row] - 1, step.context_len[next] - 1});
        if (shared < LEAST_SHARED || (run.rows > 1 && run.rows * shared < (run.rows - 1) * run.shared)) break;
        run = {run.rows + 1, shared};
    }
    return run;
}

// What a run shares is read once for all its rows; then each row reads the rest of its own.
static void add_run(Tasks &made, const Model &model, const Step &step, int64_t row, const Run &run) {
    const int64_t size = run.rows * (model.heads / model.kv_heads), token = step.query_start[row];
    const int64_t parts = std::clamp<int64_t>(run.shared / LEAST_KEYS, 1, std::max<int64_t>(1, 4 * pool().threads() / model.kv_heads));
    for (int64_t head = 0; head < model.kv_heads; head++) {
        made.merges.push_back({token, run.rows, head, made.partials, parts + 1});
        for (int64_t part = 0; part < parts; part++)
            made.tasks.push_back({row, token, run.rows, head, run.shared * part / parts, run.shared * (part + 1) / parts, made.partials + part * size});
        for (int64_t i = 0; i < run.rows; i++)
            made.tasks.push_back({row + i, token + i, 1, head, run.shared, step.context_len[row + i],
                                  made.partials + parts * size + i * (model.heads / model.kv_heads)});
        made.partials += (parts + 1) * size;
    }
}

static void add_row(Tasks &made, const Model &model, const Step &step, int64_t row, int64_t split) {
    const int64_t group = model.heads / model.kv_heads;
    for (int64_t token = step.query_start[row]; token < step.query_start[row + 1]; token += QUERIES) {
        int64_t queries = std::min<int64_t>(QUERIES, step.query_start[row + 1] - token);
        int64_t context = step.positions[token + queries - 1] + 1;
        int64_t parts = std::clamp<int64_t>(context / LEAST_KEYS, 1, split);
        for (int64_t head = 0; head < model.kv_heads; head++) {
            if (parts == 1) {
                made.tasks.push_back({row, token, queries, head, 0, context, -1});
                continue;
            }
            made.merges.push_back({token, queries, head, made.partials, parts});
            for (int64_t part = 0; part < parts; part++) {
                int64_t size = (context / parts + 63) / 64 * 64, begin = part * size;
                int64_t end = part == parts - 1 ? context : std::min(context, begin + size);
                made.tasks.push_back({row, token, queries, head, begin, end, made.partials});
                made.partials += queries * group;
            }
        }
    }
}

static Tasks make_tasks(const Model &model, const Step &step) {
    Tasks made;
    int64_t count = 0;
    for (int64_t row = 0; row < step.num_rows; row++) count += (queries_of(step, row) + QUERIES - 1) / QUERIES * model.kv_heads;
    int64_t split = std::max<int64_t>(1, 4 * pool().threads() / std::max<int64_t>(1, count));
    for (int64_t row = 0; row < step.num_rows;) {
        Run run = run_from(step, row);
        if (run.rows > 1) add_run(made, model, step, row, run);
        else add_row(made, model, step, row, split);
        row += run.rows;
    }
    // The longest first: whoever is last to take one takes a short one.
    std::stable_sort(made.tasks.begin(), made.tasks.end(),
                     [](const Task &a, const Task &b) { return (a.end - a.begin) * a.queries > (b.end - b.begin) * b.queries; });
    return made;
}

static void merge(const Model &model, const Merge &merged, const float *partials, const Target &out) {
    int64_t dim = model.head_dim, group = model.heads / model.kv_heads, size = merged.queries * group;
    std::vector<float> whole(static_cast<size_t>(dim));
    for (int64_t i = 0; i < size; i++) {
        float largest = -INFINITY, total = 0;
        auto part = [&](int64_t index) { return partials + (merged.partial + index * size + i) * (dim + 2); };
        for (int64_t p = 0; p < merged.parts; p++) largest = std::max(largest, part(p)[dim]);
        std::fill(whole.begin(), whole.end(), 0.0f);
        for (int64_t p = 0; p < merged.parts; p++) {
            float weight = part(p)[dim] == -INFINITY ? 0.0f : fast_exp(part(p)[dim] - largest);
            total += weight * part(p)[dim + 1];
            for (int64_t d = 0; d < dim; d++) whole[d] += weight * part(p)[d];
        }
        for (int64_t d = 0; d < dim; d++) whole[d] /= total;
        put(whole.data(), out, merged.token + i / group, (merged.kv_head * group + i % group) * dim, dim);
    }
}

static void attend(const Model &model, const Layer &layer, const Step &step, const Tasks &tasks, const float *qkv, const Target &out,
                   float *partials, Worker &me) {
    me.deal(int64_t(tasks.tasks.size()), 1, [&](int64_t task, int64_t end) {
        for (; task < end; task++) kernels().attend(model, layer, step, qkv, out, partials, tasks.tasks[task], scratch(me.thread));
    });
    if (tasks.merges.empty()) return;
    me.deal(int64_t(tasks.merges.size()), 1, [&](int64_t i, int64_t end) {
        for (; i < end; i++) merge(model, tasks.merges[i], partials, out);
    });
}

void attend_all(const Model &model, int layer, const Step &step, const float *qkv, float *out) {
    Tasks tasks = make_tasks(model, step);
    float *partials = partials_.get<float>(tasks.partials * (model.head_dim + 2));
    Target target{out, nullptr, int64_t(model.heads) * model.head_dim};
    work([&](Worker &me) { attend(model, model.layers[layer], step, tasks, qkv, target, partials, me); });
}

// --- the step ----------------------------------------------------------------------------------------------------------

static int64_t vocab_rows(const Model &model) { return model.vocab_rows ? model.vocab_rows : model.vocab; }

// A row that another rank has is zeros here.
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
}

// The other ranks, as a step meets them.
struct Peers {
    const Group *group;
    int code = 0;

    // Sums an array over all ranks, in place. False, on every thread: they did not meet, and the step ends here.
    bool sum(float *values, int64_t count, Worker &me) {
        if (!group) return true;
        if (me.thread == 0) code = octavo_reduce(group, values, count);
        pool().barrier();
        return code == 0;
    }
};

int run_step(const Model &model, const Step &step) {
    const int64_t tokens = step.num_tokens, size = model.hidden, vocab = vocab_rows(model);
    const int64_t heads = (model.heads + 2 * model.kv_heads) * model.head_dim;
    float *stream = stream_.get<float>(tokens * size), *added = added_.get<float>(tokens * size), *qkv = qkv_.get<float>(tokens * heads);
    float *attended = attended_.get<float>(tokens * model.heads * model.head_dim), *gated = gated_.get<float>(tokens * model.intermediate);
    Tasks tasks = make_tasks(model, step);
    float *partials = partials_.get<float>(std::max<int64_t>(1, tasks.partials) * (model.head_dim + 2));
    // Layers may differ in form: buffers are as large as any needs before threads start, they must not grow under a reader.
    for (int index = 0; index < model.num_layers; index++) {
        const Layer &layer = model.layers[index];
        for (const Matrix *matrix : {&layer.qkv, &layer.gate_up}) normed_.get(*matrix, tokens, tokens);
        for (const Matrix *matrix : {&layer.output, &layer.down}) made_.get(*matrix, tokens, tokens);
    }
    if (step.num_samples && !step.passed) normed_.get(model.head, step.num_samples, tokens);

    Peers peers{model.group};
    work([&](Worker &me) {
        auto each_token = [&](auto run) {
            me.deal(tokens, TOKENS, [&](int64_t token, int64_t end) {
                for (; token < end; token++) run(token);
            });
        };
        each_token([&](int64_t token) {
            if (step.received) memcpy(stream + token * size, step.received + token * size, size_t(size) * sizeof(float));
            else embed(model, step, stream, token);
        });
        if (!step.received && vocab < model.vocab && !peers.sum(stream, tokens * size, me)) return;
        const float *news = nullptr;  // what the last sub-layer adds to the stream
        auto norm = [&](int64_t token, const float *weight, float *y) {
            kernels().add_rms_norm(stream + token * size, news ? news + token * size : nullptr, weight, model.eps, y, size);
        };
        auto norm_rows = [&](const float *weight, const Matrix &matrix) {
            Rows rows = normed_.get(matrix, tokens, tokens);
            float *row = static_cast<float *>(scratch(me.thread));
            each_token([&](int64_t token) {
                norm(token, weight, row);
                kernels().prepare(matrix, row, rows, token);
            });
            news = added;
            return rows;
        };
        for (int index = 0; index < model.num_layers; index++) {
            const Layer &layer = model.layers[index];
            multiply(layer.qkv, norm_rows(layer.attention_norm, layer.qkv), qkv, heads, me);
            each_token([&](int64_t token) { kernels().write(model, layer, step, qkv, token); });
            Rows rows = made_.get(layer.output, tokens, tokens);
            Target made = target_of(layer.output, rows, attended);
            attend(model, layer, step, tasks, qkv, made, partials, me);
            prepare(layer.output, made, rows, me);
            multiply(layer.output, rows, added, size, me);
            if (!peers.sum(added, tokens * size, me)) return;
            Rows normed = norm_rows(layer.mlp_norm, layer.gate_up);
            rows = made_.get(layer.down, tokens, tokens);
            made = target_of(layer.down, rows, gated);
            gate_up(layer.gate_up, normed, made, me);
            prepare(layer.down, made, rows, me);
            multiply(layer.down, rows, added, size, me);
            if (!peers.sum(added, tokens * size, me)) return;
        }
        if (step.passed) {
            each_token([&](int64_t token) {
                for (int64_t i = token * size; i < (token + 1) * size; i++) step.passed[i] = stream[i] + added[i];
            });
            return;
        }
        each_token([&](int64_t token) { norm(token, model.norm, step.hidden + token * size); });
        if (step.num_samples == 0) return;
        Rows rows = normed_.get(model.head, step.num_samples, tokens);
        me.deal(step.num_samples, 1, [&](int64_t i, int64_t end) {
            for (; i < end; i++) kernels().prepare(model.head, step.hidden + step.sample_index[i] * size, rows, i);
        });
        multiply(model.head, rows, step.logits, vocab, me);
        me.deal(step.num_samples, 1, [&](int64_t i, int64_t end) {
            for (; i < end; i++) step.best[i] = model.vocab_start + kernels().argmax(step.logits + i * vocab, vocab);
        });
    });
    return peers.code;
}

}  // namespace octavo
