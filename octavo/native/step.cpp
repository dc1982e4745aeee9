// One step of a decoder: every thread walks through all layers, with a barrier wherever it needs what the others made.
//
//     embed -> [ norm -> qkv -> write k, v -> attend -> output -> norm -> gate, up -> down ] x layers -> norm -> logits -> argmax
//
// Rows are prepared by rows, products are shared out by panels, attention by tasks that threads take as they get done.
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

// Rows prepared for a product.
struct RowBuffer {
    Buffer values, scale, sum;

    Rows get(const Matrix &matrix, int64_t count) {
        Rows rows{};
        rows.form = kernels().form(matrix, count);
        rows.rows = count;
        rows.stride = padded(matrix);
        void *memory = values.get<float>((count + 31) / 32 * 32 * rows.stride);  // tiles read whole blocks of rows
        rows.values = static_cast<float *>(memory);
        rows.halves = static_cast<uint16_t *>(memory);
        rows.codes = static_cast<int8_t *>(memory);
        if (rows.form == Form::INT8) {
            rows.scale = scale.get<float>(count * (rows.stride / matrix.group));
            rows.sum = sum.get<float>(count * (rows.stride / matrix.group));
        }
        return rows;
    }
};

static RowBuffer normed_, made_;  // what norms give; what attention and gates give
static Buffer stream_, qkv_, attended_, gated_, added_, partials_;
static std::vector<Buffer> scratch_;
static std::atomic<int64_t> next_task_[2];

void *scratch(int thread) { return scratch_[thread].get<char>(SCRATCH_BYTES); }
void make_scratch(int threads) { scratch_.resize(threads); }

// Where results go that are rows of the next product: to the place it reads, if bfloat16 is all that makes them ready.
static Target target_of(const Matrix &matrix, const Rows &rows, float *values) {
    bool straight = rows.form == Form::BF16 && !matrix.order && rows.stride == matrix.k;
    return {values, straight ? rows.halves : nullptr, matrix.k};
}

// Makes rows ready that are still floats.
static void prepare(const Matrix &matrix, const Target &made, const Rows &rows, int thread) {
    if (made.halves) return;
    Range mine = share(rows.rows, thread, pool().threads());
    for (int64_t row = mine.begin; row < mine.end; row++) kernels().prepare(matrix, made.values + row * matrix.k, rows, row);
    pool().barrier();
}

static void multiply(const Matrix &matrix, const Rows &rows, float *y, int64_t stride, int thread) {
    Range part = share(panels(matrix.n), thread, pool().threads());
    kernels().product(matrix, rows, part.begin, part.end, y, stride, scratch(thread));
    pool().barrier();
}

static void gate_up(const Matrix &matrix, const Rows &rows, const Target &y, int thread) {
    Range part = share(panels(matrix.n / 2), thread, pool().threads());
    kernels().gate_up(matrix, rows, part.begin, part.end, y, scratch(thread));
    pool().barrier();
}

void multiply_all(const Matrix &matrix, const float *x, float *y, int64_t count, bool gated) {
    if (!count) return;
    Rows rows = normed_.get(matrix, count);
    together([&](int thread) {
        prepare(matrix, {const_cast<float *>(x), nullptr, matrix.k}, rows, thread);
        if (gated) gate_up(matrix, rows, {y, nullptr, matrix.n / 2}, thread);
        else multiply(matrix, rows, y, matrix.n, thread);
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

static Tasks make_tasks(const Model &model, const Step &step) {
    Tasks made;
    int64_t group = model.heads / model.kv_heads, count = 0, wanted = 4 * pool().threads();
    for (int64_t row = 0; row < step.num_rows; row++) {
        int64_t queries = step.query_start[row + 1] - step.query_start[row];
        count += (queries + QUERIES - 1) / QUERIES * model.kv_heads;
    }
    int64_t split = std::max<int64_t>(1, wanted / std::max<int64_t>(1, count));
    for (int64_t row = 0; row < step.num_rows; row++) {
        for (int64_t token = step.query_start[row]; token < step.query_start[row + 1]; token += QUERIES) {
            int64_t queries = std::min(QUERIES, step.query_start[row + 1] - token);
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

// Takes tasks until there are none left. `turn` alternates, so that the other counter can be put back meanwhile.
static void attend(const Model &model, const Layer &layer, const Step &step, const Tasks &tasks, const float *qkv, const Target &out,
                   float *partials, int turn, int thread) {
    int64_t count = int64_t(tasks.tasks.size());
    for (int64_t i; (i = next_task_[turn].fetch_add(1, std::memory_order_relaxed)) < count;)
        kernels().attend(model, layer, step, qkv, out, partials, tasks.tasks[i], scratch(thread));
    pool().barrier();
    if (thread == 0) next_task_[turn].store(0, std::memory_order_relaxed);
    if (tasks.merges.empty()) return;
    Range mine = share(int64_t(tasks.merges.size()), thread, pool().threads());
    for (int64_t i = mine.begin; i < mine.end; i++) merge(model, tasks.merges[i], partials, out);
    pool().barrier();
}

void attend_all(const Model &model, int layer, const Step &step, const float *qkv, float *out) {
    Tasks tasks = make_tasks(model, step);
    float *partials = partials_.get<float>(tasks.partials * (model.head_dim + 2));
    Target target{out, nullptr, int64_t(model.heads) * model.head_dim};
    together([&](int thread) { attend(model, model.layers[layer], step, tasks, qkv, target, partials, 0, thread); });
}

// --- the step ----------------------------------------------------------------------------------------------------------

static void embed(const Model &model, const Step &step, float *stream, int64_t token) {
    int64_t id = step.token_ids[token], size = model.hidden;
    float *to = stream + token * size;
    if (model.embed_kind == OCTAVO_F32) {
        memcpy(to, static_cast<const float *>(model.embed) + id * size, size * sizeof(float));
    } else if (model.embed_kind == OCTAVO_BF16) {
        const uint16_t *from = static_cast<const uint16_t *>(model.embed) + id * size;
        for (int64_t i = 0; i < size; i++) to[i] = bf16_to_float(from[i]);
    } else {
        unpack_row(model.head, id, to);
    }
}

void run_step(const Model &model, const Step &step) {
    const int64_t tokens = step.num_tokens, size = model.hidden, heads = (model.heads + 2 * model.kv_heads) * model.head_dim;
    float *stream = stream_.get<float>(tokens * size), *added = added_.get<float>(tokens * size), *qkv = qkv_.get<float>(tokens * heads);
    float *attended = attended_.get<float>(tokens * model.heads * model.head_dim), *gated = gated_.get<float>(tokens * model.intermediate);
    Tasks tasks = make_tasks(model, step);
    float *partials = partials_.get<float>(std::max<int64_t>(1, tasks.partials) * (model.head_dim + 2));
    // Layers may differ in form: buffers are as large as any needs before threads start, they must not grow under a reader.
    for (int index = 0; index < model.num_layers; index++) {
        const Layer &layer = model.layers[index];
        normed_.get(layer.qkv, tokens), normed_.get(layer.gate_up, tokens), made_.get(layer.output, tokens), made_.get(layer.down, tokens);
    }
    if (step.num_samples) normed_.get(model.head, step.num_samples);

    together([&](int thread) {
        const Range mine = share(tokens, thread, pool().threads());
        for (int64_t token = mine.begin; token < mine.end; token++) embed(model, step, stream, token);
        const float *news = nullptr;  // what the last sub-layer adds to the stream
        auto norm = [&](int64_t token, const float *weight, float *y) {
            kernels().add_rms_norm(stream + token * size, news ? news + token * size : nullptr, weight, model.eps, y, size);
        };
        auto norm_rows = [&](const float *weight, const Matrix &matrix) {
            Rows rows = normed_.get(matrix, tokens);
            float *row = static_cast<float *>(scratch(thread));
            for (int64_t token = mine.begin; token < mine.end; token++) {
                norm(token, weight, row);
                kernels().prepare(matrix, row, rows, token);
            }
            news = added;
            pool().barrier();
            return rows;
        };
        for (int index = 0; index < model.num_layers; index++) {
            const Layer &layer = model.layers[index];
            multiply(layer.qkv, norm_rows(layer.attention_norm, layer.qkv), qkv, heads, thread);
            for (int64_t token = mine.begin; token < mine.end; token++) kernels().write(model, layer, step, qkv, token);
            pool().barrier();
            Rows rows = made_.get(layer.output, tokens);
            Target made = target_of(layer.output, rows, attended);
            attend(model, layer, step, tasks, qkv, made, partials, index % 2, thread);
            prepare(layer.output, made, rows, thread);
            multiply(layer.output, rows, added, size, thread);
            Rows normed = norm_rows(layer.mlp_norm, layer.gate_up);
            rows = made_.get(layer.down, tokens);
            made = target_of(layer.down, rows, gated);
            gate_up(layer.gate_up, normed, made, thread);
            prepare(layer.down, made, rows, thread);
            multiply(layer.down, rows, added, size, thread);
        }
        for (int64_t token = mine.begin; token < mine.end; token++) norm(token, model.norm, step.hidden + token * size);
        pool().barrier();
        if (step.num_samples == 0) return;
        Rows rows = normed_.get(model.head, step.num_samples);
        const Range samples = share(step.num_samples, thread, pool().threads());
        for (int64_t i = samples.begin; i < samples.end; i++)
            kernels().prepare(model.head, step.hidden + step.sample_index[i] * size, rows, i);
        pool().barrier();
        multiply(model.head, rows, step.logits, model.vocab, thread);
        for (int64_t i = samples.begin; i < samples.end; i++) step.best[i] = kernels().argmax(step.logits + i * model.vocab, model.vocab);
    });
}

}  // namespace octavo
