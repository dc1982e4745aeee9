// Which queries attend to which keys at once, and how parts of a context become one.
#include "attend.h"

#include <cmath>

#include "scalar.h"

namespace octavo {

static const int64_t QUERIES = 64;     // of one task: they share every key they load
static const int64_t LEAST_KEYS = 256; // of a part of a context: less is not worth merging
static const int64_t LEAST_SHARED = 64; // keys that rows have in common, to be read once for all

static int64_t queries_of(const Step &step, int64_t row) { return step.query_start[row + 1] - step.query_start[row]; }

struct Run {  // rows of one token each, one behind the other, whose contexts begin with the same blocks
    int64_t rows, shared;
};

// The run from `row` on that saves most: a row joins if the keys that need not be read again do not become fewer by it.
static Run run_from(const Layer &layer, const Step &step, int64_t row) {
    Run run{1, INT64_MAX};
    if (!step.shared) return run;
    const int32_t *with_last = step.shared + layer.cache_group * step.num_rows;
    auto may_join = [&](int64_t other) {  // it has one token, which sees its context from the beginning on
        return other < step.num_rows && queries_of(step, other) == 1 && (!layer.window || step.context_len[other] <= layer.window);
    };
    while (may_join(row) && may_join(row + run.rows)) {
        int64_t next = row + run.rows, shared = std::min<int64_t>({run.shared, with_last[next], step.context_len[row] - 1, step.context_len[next] - 1});
        if (shared < LEAST_SHARED || (run.rows > 1 && run.rows * shared < (run.rows - 1) * run.shared)) break;
        run = {run.rows + 1, shared};
    }
    return run;
}

// What a run shares is read once for all its rows; then each row reads the rest of its own.
static void add_run(Tasks &made, const Layer &layer, const Step &step, int64_t row, const Run &run) {
    const int64_t size = run.rows * (layer.heads / layer.kv_heads), token = step.query_start[row];
    const int64_t parts = std::clamp<int64_t>(run.shared / LEAST_KEYS, 1, std::max<int64_t>(1, 4 * pool().threads() / layer.kv_heads));
    for (int64_t head = 0; head < layer.kv_heads; head++) {
        made.merges.push_back({token, run.rows, head, made.partials, parts + 1});
        for (int64_t part = 0; part < parts; part++)
            made.tasks.push_back({row, token, run.rows, head, run.shared * part / parts, run.shared * (part + 1) / parts, made.partials + part * size});
        for (int64_t i = 0; i < run.rows; i++)
            made.tasks.push_back({row + i, token + i, 1, head, run.shared, step.context_len[row + i],
                                  made.partials + parts * size + i * (layer.heads / layer.kv_heads)});
        made.partials += (parts + 1) * size;
    }
}

// Keys behind the window of a task's first query are no part of it.
static void add_row(Tasks &made, const Layer &layer, const Step &step, int64_t row, int64_t split) {
    const int64_t group = layer.heads / layer.kv_heads;
    for (int64_t token = step.query_start[row]; token < step.query_start[row + 1]; token += QUERIES) {
        int64_t queries = std::min<int64_t>(QUERIES, step.query_start[row + 1] - token);
        int64_t first = first_seen(layer, step.positions[token]), context = step.positions[token + queries - 1] + 1;
        int64_t parts = std::clamp<int64_t>((context - first) / LEAST_KEYS, 1, split);
        for (int64_t head = 0; head < layer.kv_heads; head++) {
            if (parts == 1) {
                made.tasks.push_back({row, token, queries, head, first, context, -1});
                continue;
            }
            made.merges.push_back({token, queries, head, made.partials, parts});
            for (int64_t part = 0; part < parts; part++) {
                int64_t size = ((context - first) / parts + 63) / 64 * 64, begin = first + part * size;
                int64_t end = part == parts - 1 ? context : std::min(context, begin + size);
                made.tasks.push_back({row, token, queries, head, begin, end, made.partials});
                made.partials += queries * group;
            }
        }
    }
}

static Tasks make_tasks(const Layer &layer, const Step &step) {
    Tasks made;
    int64_t count = 0;
    for (int64_t row = 0; row < step.num_rows; row++) count += (queries_of(step, row) + QUERIES - 1) / QUERIES * layer.kv_heads;
    int64_t split = std::max<int64_t>(1, 4 * pool().threads() / std::max<int64_t>(1, count));
    for (int64_t row = 0; row < step.num_rows;) {
        Run run = run_from(layer, step, row);
        if (run.rows > 1) add_run(made, layer, step, row, run);
        else add_row(made, layer, step, row, split);
        row += run.rows;
    }
    // The longest first: whoever is last to take one takes a short one.
    std::stable_sort(made.tasks.begin(), made.tasks.end(),
                     [](const Task &a, const Task &b) { return (a.end - a.begin) * a.queries > (b.end - b.begin) * b.queries; });
    return made;
}

static bool alike(const Layer &a, const Layer &b) {
    return a.heads == b.heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim && a.window == b.window && a.cache_group == b.cache_group;
}

StepTasks::StepTasks(const Model &model, const Step &step) {
    std::vector<const Layer *> kinds;
    for (const Layer *layer = model.layers; layer < model.layers + model.num_layers; layer++) {
        auto same = std::find_if(kinds.begin(), kinds.end(), [&](const Layer *other) { return alike(*layer, *other); });
        kind_.push_back(size_t(same - kinds.begin()));
        if (same != kinds.end()) continue;
        kinds.push_back(layer);
        made_.push_back(make_tasks(*layer, step));
        partial_numbers_ = std::max(partial_numbers_, made_.back().partials * (layer->head_dim + 2));
    }
}

static void merge(const Layer &layer, const Merge &merged, const float *partials, const Target &out) {
    int64_t dim = layer.head_dim, group = layer.heads / layer.kv_heads, size = merged.queries * group;
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
        const int64_t head = merged.kv_head * group + i % group;
        total = with_sink(layer, head, largest, total);
        for (int64_t d = 0; d < dim; d++) whole[d] /= total;
        put(whole.data(), out, merged.token + i / group, head * dim, dim);
    }
}

void attend(const Model &model, const Layer &layer, const Step &step, const Tasks &tasks, const float *qkv, const Target &out, float *partials,
            Worker &me) {
    me.deal(int64_t(tasks.tasks.size()), 1, [&](int64_t task, int64_t end) {
        for (; task < end; task++) kernels().attend(model, layer, step, qkv, out, partials, tasks.tasks[task], scratch(me.thread));
    });
    if (tasks.merges.empty()) return;
    me.deal(int64_t(tasks.merges.size()), 1, [&](int64_t i, int64_t end) {
        for (; i < end; i++) merge(layer, tasks.merges[i], partials, out);
    });
}

static Buffer partials_;

float *partials_for(const StepTasks &tasks) { return partials_.get<float>(tasks.partial_numbers()); }

void attend_all(const Model &model, int layer, const Step &step, const float *qkv, float *out) {
    const Layer &one = model.layers[layer];
    const StepTasks tasks(model, step);
    float *partials = partials_for(tasks);
    Target target{out, nullptr, int64_t(one.heads) * one.head_dim};
    work([&](Worker &me) { attend(model, one, step, tasks.of(layer), qkv, target, partials, me); });
}

}  // namespace octavo
