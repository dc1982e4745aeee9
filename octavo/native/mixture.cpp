// A mixture of experts (MoE). Tokens are sorted by expert, so that an expert's weights are read once for all its tokens:
//
//     scores (router) -> chosen experts of each token, with weights -> rows sorted by expert -> gate, up -> down -> weighted sums
//
// The products of all chosen experts and of the shared expert form one list of panels, which threads take in pieces. So all threads
// are busy with one token and a few experts, as well as with many tokens.
#include "mixture.h"

#include <cstring>
#include <vector>

#include "scalar.h"
#include "stack.h"

namespace octavo {

struct Chosen {
    int32_t expert;
    float weight;
    int64_t place;  // index of the token's row in the order of experts; -1: another rank has the expert
};

struct Job {  // a product with the weights of one expert
    Matrix matrix;
    Rows rows;
    Target to;
    int64_t first;  // number of its first panel, or pair of panels, among those of all jobs
};

static RowBuffer routed_, weighed_, read_, sorted_, inner_;  // input rows of the router, shared gate, experts (unsorted, sorted) and down
static RowBuffer shared_read_, shared_inner_;
static const int MOST_GROUPS = 1024;    // as many as there are experts at most
static Buffer scores_, ranked_, gates_, chosen_, source_, gated_, made_, shared_gated_, shared_made_;
static std::vector<Job> ups_, downs_;  // each with one extra entry, which marks the end
static std::vector<int64_t> begin_;    // the first sorted row of each expert, and the end
static std::vector<int64_t> next_;     // the next sorted row of each expert, while rows are assigned
static int64_t used_;                  // number of sorted rows

static void copy_row(const Matrix &matrix, const Rows &from, int64_t row, const Rows &to, int64_t place) {
    const int64_t spans = from.stride / span_of(matrix), bytes = row_bytes(from);
    memcpy(to.codes + place * bytes, from.codes + row * bytes, size_t(bytes));
    if (from.scale) memcpy(to.scale + place * spans, from.scale + row * spans, size_t(spans) * sizeof(float));
    if (from.sum) memcpy(to.sum + place * spans, from.sum + row * spans, size_t(spans) * sizeof(float));
}

// All buffers of an MoE step. Each call returns the same memory.
struct Mixing {
    const Mixture &mixture;
    const int64_t tokens, places = tokens * mixture.chosen, hidden = mixture.router.k;
    const int64_t each = std::max<int64_t>(1, places / mixture.count);  // the approximate number of rows per expert, which determines the format
    const bool shared = mixture.shared_gate_up.n > 0, weighed = mixture.shared_gate.n > 0;

    Rows routed() const { return routed_.get(mixture.router, tokens, tokens); }
    Rows weighing() const { return weighed_.get(mixture.shared_gate, tokens, tokens); }
    Rows read() const { return whole_blocks(read_, mixture.experts_gate_up, tokens, each); }
    Rows sorted() const { return whole_blocks(sorted_, mixture.experts_gate_up, places, each); }
    Rows inner() const { return whole_blocks(inner_, mixture.experts_down, places, each); }
    Rows shared_read() const { return shared_read_.get(mixture.shared_gate_up, tokens, tokens); }
    Rows shared_inner() const { return shared_inner_.get(mixture.shared_down, tokens, tokens); }
    float *scores() const { return scores_.get<float>(tokens * mixture.count); }
    float *ranked() const { return ranked_.get<float>(tokens * mixture.count); }  // what experts are chosen by, if not by their scores alone
    float *gates() const { return gates_.get<float>(tokens); }
    Chosen *chosen() const { return chosen_.get<Chosen>(places); }
    int64_t *source() const { return source_.get<int64_t>(places); }  // sorted row -> token
    float *made() const { return made_.get<float>(places * hidden); }
    float *shared_made() const { return shared_made_.get<float>(tokens * hidden); }
    Target gated() const { return target_of(mixture.experts_down, inner(), gated_.get<float>(places * mixture.experts_down.k)); }
    Target shared_gated() const {
        return target_of(mixture.shared_down, shared_inner(), shared_gated_.get<float>(tokens * mixture.shared_down.k));
    }
};

static bool ranks_scores(const Mixture &mixture) { return mixture.bias || mixture.chosen_groups < mixture.groups; }

// Experts of a group that is not one of the best get rank -infinity. The lower group is the better one in a tie.
static void drop_groups(const Mixture &mixture, float *ranked) {
    const int32_t size = mixture.count / mixture.groups;
    float best[MOST_GROUPS];
    for (int32_t group = 0; group < mixture.groups; group++) {
        float first = -INFINITY, second = -INFINITY;
        for (const float *one = ranked + group * size, *end = one + size; one < end; one++) {
            if (*one > first) second = first, first = *one;
            else if (*one > second) second = *one;
        }
        best[group] = mixture.sigmoid ? first + second : first;
    }
    for (int32_t group = 0; group < mixture.groups; group++) {
        int32_t better = 0;
        for (int32_t other = 0; other < mixture.groups; other++) better += best[other] > best[group] || (best[other] == best[group] && other < group);
        if (better >= mixture.chosen_groups) std::fill(ranked + group * size, ranked + (group + 1) * size, -INFINITY);
    }
}

// Returns what the experts of a token are chosen by, the larger the better.
static const float *rank(const Mixing &mixing, int64_t token) {
    const Mixture &mixture = mixing.mixture;
    float *scores = mixing.scores() + token * mixture.count;
    if (mixture.sigmoid)
        for (int32_t expert = 0; expert < mixture.count; expert++) scores[expert] = 1.0f / (1.0f + fast_exp(-scores[expert]));
    if (!ranks_scores(mixture)) return scores;
    float *ranked = mixing.ranked() + token * mixture.count;
    for (int32_t expert = 0; expert < mixture.count; expert++) ranked[expert] = scores[expert] + (mixture.bias ? mixture.bias[expert] : 0.0f);
    if (mixture.chosen_groups < mixture.groups) drop_groups(mixture, ranked);
    return ranked;
}

// Selects the best experts, the lower number first in a tie. If scores are NaN, some experts are selected and the result is NaN.
static void choose(const Mixture &mixture, const float *ranked, Chosen *chosen) {
    const int32_t most = mixture.chosen;
    for (int32_t expert = 0, held = 0; expert < mixture.count; expert++) {
        int32_t at = held;
        while (at > 0 && ranked[expert] > ranked[chosen[at - 1].expert]) at--;
        if (at == most) continue;
        for (int32_t i = std::min(held, most - 1); i > at; i--) chosen[i] = chosen[i - 1];
        chosen[at].expert = expert;
        held = std::min(held + 1, most);
    }
}

// Computes the weights of the chosen experts.
static void weigh(const Mixture &mixture, const float *scores, Chosen *chosen) {
    const int32_t most = mixture.chosen;
    float total = 0, all = 1;
    if (mixture.sigmoid) {
        for (int32_t i = 0; i < most; i++) total += chosen[i].weight = scores[chosen[i].expert];
        total += 1e-20f;  // if all are 0
    } else {
        const float largest = mixture.chosen_groups < mixture.groups ? *std::max_element(scores, scores + mixture.count) : scores[chosen[0].expert];
        for (int32_t i = 0; i < most; i++) total += chosen[i].weight = fast_exp(scores[chosen[i].expert] - largest);
        all = 0;
        for (int32_t expert = 0; expert < mixture.count; expert++) all += fast_exp(scores[expert] - largest);
    }
    const bool over_chosen = mixture.normed || !(mixture.over_all || mixture.sigmoid);
    for (int32_t i = 0; i < most; i++) chosen[i].weight /= over_chosen ? total : all;
    if (mixture.scale != 0)
        for (int32_t i = 0; i < most; i++) chosen[i].weight *= mixture.scale;
}

static void choose_for(const Mixing &mixing, int64_t token) {
    const Mixture &mixture = mixing.mixture;
    Chosen *chosen = mixing.chosen() + token * mixture.chosen;
    choose(mixture, rank(mixing, token), chosen);
    weigh(mixture, mixing.scores() + token * mixture.count, chosen);
}

// Assigns every chosen expert its sorted row.
static void sort(const Mixing &mixing) {
    const Mixture &mixture = mixing.mixture;
    auto here = [&](const Chosen &one) { return one.expert >= mixture.first && one.expert < mixture.first + mixture.held; };
    begin_.assign(size_t(mixture.held) + 1, 0);
    Chosen *chosen = mixing.chosen(), *end = chosen + mixing.places;
    for (Chosen *one = chosen; one < end; one++)
        if (here(*one)) begin_[size_t(one->expert - mixture.first) + 1]++;
    for (int32_t expert = 0; expert < mixture.held; expert++) begin_[expert + 1] += begin_[expert];
    next_ = begin_;
    for (Chosen *one = chosen; one < end; one++) {
        one->place = here(*one) ? next_[size_t(one->expert - mixture.first)]++ : -1;
        if (one->place >= 0) mixing.source()[one->place] = (one - chosen) / mixture.chosen;
    }
    used_ = begin_.back();
}

// Creates the products of all chosen experts.
static void list_jobs(const Mixing &mixing) {
    const Mixture &mixture = mixing.mixture;
    const int64_t held = mixture.held, up = mixture.experts_gate_up.n / held;
    ups_.clear(), downs_.clear();
    int64_t pairs = 0, rows = 0;
    auto add = [&](const Matrix &gate_up, const Rows &read, const Target &gated, const Matrix &down, const Rows &inner, float *made) {
        ups_.push_back({gate_up, read, gated, pairs});
        downs_.push_back({down, inner, {made, nullptr, mixing.hidden}, rows});
        pairs += panels(gate_up.n / 2), rows += panels(mixing.hidden);
    };
    if (mixing.shared)
        add(mixture.shared_gate_up, mixing.shared_read(), mixing.shared_gated(), mixture.shared_down, mixing.shared_inner(), mixing.shared_made());
    const Rows sorted = mixing.tokens > 1 ? mixing.sorted() : mixing.read(), inner = mixing.inner();
    const Target gated = mixing.gated();
    for (int64_t expert = 0; expert < held; expert++) {
        const int64_t first = begin_[expert], count = begin_[expert + 1] - first, place = first * gated.stride;
        if (count == 0) continue;
        add(part_of(mixture.experts_gate_up, expert, held, up),
            some_rows(mixture.experts_gate_up, sorted, mixing.tokens > 1 ? first : 0, count),
            {gated.values + place, gated.halves ? gated.halves + place : nullptr, gated.stride},
            part_of(mixture.experts_down, expert, held, mixing.hidden), some_rows(mixture.experts_down, inner, first, count),
            mixing.made() + first * mixing.hidden);
    }
    ups_.push_back({{}, {}, {}, pairs}), downs_.push_back({{}, {}, {}, rows});
}

// Calls run(job, panel, end) for pieces of all jobs' panels.
template <class Run> static void deal_jobs(const std::vector<Job> &jobs, int64_t unit, Worker &me, Run run) {
    me.deal(jobs.back().first, unit, [&](int64_t begin, int64_t end) {
        auto job = std::upper_bound(jobs.begin(), jobs.end(), begin, [](int64_t panel, const Job &other) { return panel < other.first; }) - 1;
        for (; begin < end; job++) {
            const int64_t last = std::min(end, job[1].first);
            run(*job, begin - job->first, last - job->first);
            begin = last;
        }
    });
}

static void add_up(const Mixing &mixing, float *y, int64_t token) {
    const int64_t hidden = mixing.hidden;
    const Chosen *chosen = mixing.chosen() + token * mixing.mixture.chosen;
    float *sum = y + token * hidden;
    std::fill(sum, sum + hidden, 0.0f);
    auto add = [&](const float *row, float weight) {
        for (int64_t i = 0; i < hidden; i++) sum[i] += weight * row[i];
    };
    for (int32_t i = 0; i < mixing.mixture.chosen; i++)
        if (chosen[i].place >= 0) add(mixing.made() + chosen[i].place * hidden, chosen[i].weight);
    if (mixing.shared) add(mixing.shared_made() + token * hidden, mixing.weighed ? 1.0f / (1.0f + fast_exp(-mixing.gates()[token])) : 1.0f);
}

void reserve_mixture(const Mixture &mixture, int64_t tokens) {
    const Mixing mixing{mixture, tokens};
    mixing.routed(), mixing.read(), mixing.sorted(), mixing.gated();
    mixing.scores(), mixing.chosen(), mixing.source(), mixing.made();
    if (ranks_scores(mixture)) mixing.ranked();
    if (mixing.weighed) mixing.weighing(), mixing.gates();
    if (mixing.shared) mixing.shared_read(), mixing.shared_gated(), mixing.shared_made();
    const size_t held = size_t(mixture.held);
    begin_.reserve(held + 1), next_.reserve(held + 1), ups_.reserve(held + 2), downs_.reserve(held + 2);  // with the shared expert
}

void take_token(const Mixture &mixture, int64_t tokens, int64_t token, const float *row) {
    const Mixing mixing{mixture, tokens};
    kernels().prepare(mixture.router, row, mixing.routed(), token);
    kernels().prepare(mixture.experts_gate_up, row, mixing.read(), token);
    if (mixing.weighed) kernels().prepare(mixture.shared_gate, row, mixing.weighing(), token);
    if (mixing.shared) kernels().prepare(mixture.shared_gate_up, row, mixing.shared_read(), token);
}

void mix(const Mixture &mixture, int activation, int64_t tokens, float *y, Worker &me) {
    const Mixing mixing{mixture, tokens};
    multiply(mixture.router, mixing.routed(), mixing.scores(), mixture.count, me);
    if (mixing.weighed) multiply(mixture.shared_gate, mixing.weighing(), mixing.gates(), 1, me);
    auto choose_some = [&](int64_t token, int64_t end) {
        for (; token < end; token++) choose_for(mixing, token);
    };
    if (tokens > TOKENS) me.deal(tokens, TOKENS, choose_some);
    me.deal(1, 1, [&](int64_t, int64_t) {
        if (tokens <= TOKENS) choose_some(0, tokens);
        sort(mixing), list_jobs(mixing);
    });
    if (tokens > 1)
        me.deal(used_, TOKENS, [&](int64_t place, int64_t end) {
            for (; place < end; place++) copy_row(mixture.experts_gate_up, mixing.read(), mixing.source()[place], mixing.sorted(), place);
        });
    deal_jobs(ups_, PANELS / 2, me, [&](const Job &job, int64_t pair, int64_t end) {
        kernels().gate_up(job.matrix, activation, job.rows, pair, end, job.to, scratch(me.thread));
    });
    prepare(mixture.experts_down, mixing.gated(), some_rows(mixture.experts_down, mixing.inner(), 0, used_), me);
    if (mixing.shared) prepare(mixture.shared_down, mixing.shared_gated(), mixing.shared_inner(), me);
    deal_jobs(downs_, PANELS, me, [&](const Job &job, int64_t panel, int64_t end) {
        kernels().product(job.matrix, job.rows, panel, end, job.to.values, job.to.stride, scratch(me.thread));
    });
    me.deal(tokens, TOKENS, [&](int64_t token, int64_t end) {
        for (; token < end; token++) add_up(mixing, y, token);
    });
}

void mix_all(const Mixture &mixture, int activation, const float *x, float *y, int64_t tokens) {
    if (!tokens) return;
    reserve_mixture(mixture, tokens);
    work([&](Worker &me) {
        me.deal(tokens, TOKENS, [&](int64_t token, int64_t end) {
            for (; token < end; token++) take_token(mixture, tokens, token, x + token * mixture.router.k);
        });
        mix(mixture, activation, tokens, y, me);
    });
}

}  // namespace octavo
