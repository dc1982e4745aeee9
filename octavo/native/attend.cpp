// Divides attention into tasks of queries and keys. No task ends inside a piece of keys, except at the end of the context.
#include "attend.h"

namespace octavo {

static const int64_t QUERIES = 64;     // in one task: they share every key they load
static const int64_t LEAST_ROWS = 8;   // in a task over shared keys, if there are as many

// Creates the tasks of a layer: those over shared keys, and those over the keys that each row reads alone.
class TaskMaker {
public:
    TaskMaker(const Layer &layer, const Step &step) : layer_(layer), step_(step), parts_of_(step.num_rows, -1), own_(step.num_rows, 0) {
        const int32_t *nodes = step.shared_start ? step.shared_start + layer.cache_group : nullptr;
        if (nodes) add_nodes(step.shared_nodes + nodes[0], step.shared_nodes + nodes[1]);
        int64_t count = 0;
        for (int64_t row = 0; row < step.num_rows; row++) count += tasks_of(step.query_start[row + 1] - step.query_start[row]) * layer.kv_heads;
        const int64_t most = at_most(count);
        for (int64_t row = 0; row < step.num_rows; row++)
            for (int64_t token = step.query_start[row]; token < step.query_start[row + 1]; token += QUERIES) add_queries(row, token, most);
        const int64_t *place = made.places.data();
        for (Task &task : made.last) task.places = place, place += task.parts;
        longest_first(made.first), longest_first(made.last);
    }

    Tasks made;

private:
    struct Runs {                    // the pieces of keys [begin, end), divided into `count` runs of whole pieces
        int64_t begin, end, count;
        int64_t pieces() const { return (end - begin + PIECE - 1) / PIECE; }
        int64_t size() const { return (pieces() + count - 1) / count * PIECE; }
        int64_t first(int64_t run) const { return std::min(end, begin + run * size()); }
        // The pieces of a first run, before which the queries have seen nothing, can be joined into one partial result.
        int64_t partials(bool nothing_before) const { return nothing_before ? 1 + (end - first(1) + PIECE - 1) / PIECE : pieces(); }
    };

    struct Part {                    // the partial results of a row over shared keys
        int64_t partial;             // index of the first one, for the first kv head
        int64_t count, stride;       // stride: from one to the next, and from the last of a kv head to the first of the next
        int64_t before;              // another part of the row, or -1
    };

    const Layer &layer_;
    const Step &step_;
    const int64_t group_ = layer_.heads / layer_.kv_heads;
    std::vector<Part> parts_;
    std::vector<int64_t> parts_of_;  // per row: the last of its parts, or -1
    std::vector<int64_t> own_;       // per row: the first key that it reads alone

    static int64_t tasks_of(int64_t queries) { return (queries + QUERIES - 1) / QUERIES; }
    static int64_t at_most(int64_t tasks) { return std::max<int64_t>(1, 4 * pool().threads() / std::max<int64_t>(1, tasks)); }
    static int64_t piece_of(int64_t position) { return position / PIECE * PIECE; }
    static Runs divide(int64_t begin, int64_t end, int64_t most) {
        Runs runs{begin, end, 1};
        runs.count = std::clamp<int64_t>(runs.pieces(), 1, most);
        runs.count = std::max<int64_t>(1, (end - begin + runs.size() - 1) / runs.size());  // none is empty
        return runs;
    }
    // The tasks taken last should be short.
    static void longest_first(std::vector<Task> &tasks) {
        std::stable_sort(tasks.begin(), tasks.end(),
                         [](const Task &a, const Task &b) { return (a.end - a.begin) * a.queries > (b.end - b.begin) * b.queries; });
    }
    int64_t first_of(int64_t token) const { return first_seen(layer_, step_.cache_index[token]); }
    int64_t length_of(int64_t row) const { return step_.context_len[layer_.cache_group * step_.context_stride + row]; }

    void add_nodes(const SharedNode *first, const SharedNode *last) {
        int64_t rows = 0, tasks = 0;
        for (const SharedNode *node = first; node < last; node++) rows += node->count;
        made.tokens.reserve(size_t(rows));  // tasks point into it, so it must not grow
        const int64_t at_once = std::clamp<int64_t>(rows * layer_.kv_heads / pool().threads(), LEAST_ROWS, QUERIES);  // enough tasks for all threads
        for (const SharedNode *node = first; node < last; node++) tasks += (node->count + at_once - 1) / at_once * layer_.kv_heads;
        for (const SharedNode *node = first; node < last; node++)
            for (int64_t i = 0; i < node->count; i += at_once)
                add_node(*node, step_.shared_rows + node->first + i, std::min<int64_t>(at_once, node->count - i), at_most(tasks));
    }

    // Only whole pieces are shared: rows read the others alone. Rows whose window starts after the keys of a node are skipped.
    void add_node(const SharedNode &node, const int32_t *rows, int64_t count, int64_t most) {
        const int32_t *tokens = made.tokens.data() + made.tokens.size();
        const int64_t end = piece_of(node.end);
        std::vector<int64_t> readers;
        int64_t begin = INT64_MAX;
        bool nothing_before = true;
        for (int64_t i = 0; i < count; i++) {
            const int32_t token = step_.query_start[rows[i]];
            own_[rows[i]] = end;
            if (first_of(token) >= end || piece_of(node.begin) == end) continue;
            begin = std::min(begin, piece_of(std::max<int64_t>(node.begin, first_of(token))));
            nothing_before = nothing_before && parts_of_[rows[i]] < 0;
            made.tokens.push_back(token);
            readers.push_back(rows[i]);
        }
        if (readers.empty()) return;
        const int64_t queries = int64_t(readers.size());
        const Runs runs = divide(begin, end, most);
        for (int64_t i = 0; i < queries; i++) {
            parts_.push_back({made.partials + i * group_, runs.partials(nothing_before), queries * group_, parts_of_[readers[i]]});
            parts_of_[readers[i]] = int64_t(parts_.size()) - 1;
        }
        for (int64_t head = 0; head < layer_.kv_heads; head++)
            add_runs({rows[0], tokens[0], queries, tokens, head, 0, 0, 0, false, nullptr, 0}, runs, nothing_before);
    }

    // Some queries of a row over the keys that it reads alone. Keys behind the window of the first query are skipped.
    void add_queries(int64_t row, int64_t token, int64_t most) {
        const int64_t queries = std::min<int64_t>(QUERIES, step_.query_start[row + 1] - token);
        const int64_t behind = step_.query_start[row + 1] - token - queries;  // queries of the row after these
        const int64_t begin = std::max(own_[row], piece_of(first_of(token))), end = length_of(row) - behind;
        const Runs runs = divide(begin, end, most);
        std::vector<int64_t> parts;
        for (int64_t part = parts_of_[row]; part >= 0; part = parts_[part].before) parts.insert(parts.begin(), part);
        for (int64_t head = 0; head < layer_.kv_heads; head++) {
            Task task{row, token, queries, nullptr, head, begin, end, -1, false, nullptr, 0};
            for (int64_t part : parts)
                for (int64_t i = 0; i < parts_[part].count; i++, task.parts++)
                    made.places.push_back(parts_[part].partial + (head * parts_[part].count + i) * parts_[part].stride);
            if (runs.count > 1) {  // all keys are in runs: the last task only joins their results
                const int64_t partials = runs.partials(parts.empty());
                for (int64_t i = 0; i < partials; i++, task.parts++) made.places.push_back(made.partials + i * queries * group_);
                add_runs(task, runs, parts.empty());
                task.begin = end;
            }
            (task.parts ? made.last : made.first).push_back(task);
        }
    }

    void add_runs(Task task, const Runs &runs, bool nothing_before) {
        task.parts = 0;
        for (int64_t run = 0; run < runs.count; run++) {
            task.begin = runs.first(run), task.end = runs.first(run + 1), task.partial = made.partials;
            task.joined = run == 0 && nothing_before;
            made.first.push_back(task);
            made.partials += (task.joined ? 1 : (task.end - task.begin + PIECE - 1) / PIECE) * task.queries * group_;
        }
    }
};

static bool alike(const Layer &a, const Layer &b) {
    return a.heads == b.heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim && a.window == b.window && a.cache_group == b.cache_group;
}

StepTasks::StepTasks(const Model &model, const Step &step) {
    std::vector<const Layer *> kinds;
    for (const Layer *layer = model.layers; layer < model.layers + model.num_layers; layer++) {
        if (layer->delta_net) {
            kind_.push_back(0);  // it has no tasks, and none are asked for
            continue;
        }
        auto same = std::find_if(kinds.begin(), kinds.end(), [&](const Layer *other) { return alike(*layer, *other); });
        kind_.push_back(size_t(same - kinds.begin()));
        if (same != kinds.end()) continue;
        kinds.push_back(layer);
        made_.push_back(TaskMaker(*layer, step).made);
        partial_numbers_ = std::max(partial_numbers_, made_.back().partials * (layer->head_dim + 2));
    }
}

void attend(const Model &model, const Layer &layer, const Step &step, const Tasks &tasks, const float *qkv, const Target &out, float *partials,
            Worker &me) {
    auto run = [&](const std::vector<Task> &some) {
        me.deal(int64_t(some.size()), 1, [&](int64_t task, int64_t end) {
            for (; task < end; task++) kernels().attend(model, layer, step, qkv, out, partials, some[task], scratch(me.thread));
        });
    };
    run(tasks.first);
    if (!tasks.last.empty()) run(tasks.last);
}

static Buffer partials_;

float *partials_for(const StepTasks &tasks) { return partials_.get<float>(tasks.partial_numbers()); }

void attend_all(const Model &model, int layer, const Step &step, const float *qkv, float *out) {
    const Layer &one = model.layers[layer];
    const StepTasks tasks(model, step);
    float *partials = partials_for(tasks);
    Target target{out, nullptr, one.heads * value_dim(one)};
    work([&](Worker &me) { attend(model, one, step, tasks.of(layer), qkv, target, partials, me); });
}

}  // namespace octavo
