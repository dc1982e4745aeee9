// Runs the cases of a file through liboctavo, at every level this machine has, with one thread and with two; no Python needed.
//
//     driver CASES        the form of the file: tests/support/case_file.py, which writes it
//
// Says which levels were built, for each that runs and each kernel how many cases passed and how far off the worst was, and
// names every case that failed. The last line is "N passed, N failed".
#include <memory>

#include "../../octavo/native/octavo.h"
#include "cases.h"

namespace {

// --- results -----------------------------------------------------------------------------------------------------------

struct Worst {
    int passed = 0, failed = 0;
    std::map<std::string, std::pair<double, double>> errors;  // by result and form: how far off, and what is allowed there
};
std::map<std::string, Worst> worst_;  // by kernel, at this level
int threads_, passed_, failed_;
std::string level_;

// One result, against all that are expected of it at this level. The first `count` numbers: a case may try fewer rows than it has.
bool near_enough(const Case &one, const std::string &title, const std::string &result, const char *got, int64_t count) {
    const Expected *best = nullptr;
    double error = 0;
    for (const Expected &each : one.expected) {
        bool meant = each.levels == "any" || ("," + each.levels + ",").find("," + level_ + ",") != std::string::npos;
        if (each.result != result || !meant) continue;
        if (each.values.count() < count) give_up(one.kernel + ", " + title + ": more " + result + " than expected ones");
        double off = difference(each, got, count);
        if (!best || off / std::max(each.tolerance, 1e-30) < error / std::max(best->tolerance, 1e-30)) best = &each, error = off;
    }
    if (!best) give_up(one.kernel + ", " + title + ": no " + result + " is expected at level " + level_);
    auto &worst = worst_[one.kernel].errors[result + " in " + best->form];
    if (error > worst.first) worst = {error, best->tolerance};
    if (error <= best->tolerance) return true;
    printf("FAILED %s, threads %d: %s %s: %s in %s is off by %.3g, allowed %.1e\n", level_.c_str(), threads_, one.kernel.c_str(),
           title.c_str(), result.c_str(), best->form.c_str(), error, best->tolerance);
    return false;
}

// Memory for a result, full of ones (NaN, -1), with more of them behind it that must stay as they are.
struct Result {
    static const size_t GUARD = 64;
    std::vector<char> bytes;
    size_t size;

    explicit Result(size_t bytes_wanted) : bytes(bytes_wanted + GUARD, '\xff'), size(bytes_wanted) {}
    explicit Result(const Array &from) : Result(from.bytes.size()) { memcpy(bytes.data(), from.bytes.data(), size); }
    template <class T> T *as() { return reinterpret_cast<T *>(bytes.data()); }
    bool whole() const { return std::all_of(bytes.begin() + long(size), bytes.end(), [](char c) { return c == '\xff'; }); }
};

using Results = std::map<std::string, Result>;

void judge(const Case &one, const std::string &title, const Results &results) {
    bool good = true;
    for (const Expected &each : one.expected)
        if (!results.count(each.result)) give_up(one.kernel + ", " + title + ": nothing gives " + each.result);
    for (const auto &[name, result] : results) {
        auto same = [&, &name = name](const Expected &each) { return each.result == name; };
        auto expected = std::find_if(one.expected.begin(), one.expected.end(), same);
        if (expected == one.expected.end()) continue;
        good &= near_enough(one, title, name, result.bytes.data(), int64_t(result.size / expected->values.width()));
        if (!result.whole()) {
            printf("FAILED %s, threads %d: %s %s: %s was written past its end\n", level_.c_str(), threads_, one.kernel.c_str(), title.c_str(), name.c_str());
            good = false;
        }
    }
    (good ? worst_[one.kernel].passed : worst_[one.kernel].failed)++;
    (good ? passed_ : failed_)++;
}

// --- kernels -----------------------------------------------------------------------------------------------------------

struct Free {
    void operator()(char *memory) const { free(memory); }
};
using Lines = std::unique_ptr<char, Free>;  // from the beginning of a cache line on

Lines lines(int64_t bytes) { return Lines(static_cast<char *>(aligned_alloc(64, size_t(bytes + 63) / 64 * 64))); }

struct Packed {
    Matrix matrix{};
    Lines data, scale, offset;

    Packed(Case &one, const std::string &prefix) {
        matrix.kind = one.number(prefix + "kind");
        matrix.group = one.number(prefix + "group");
        matrix.n = one.number(prefix + "n");
        matrix.k = one.number(prefix + "k");
        matrix.factor = float(one.real(prefix + "factor"));
        matrix.bias = one.get<float>(prefix + "bias");
        matrix.order = one.get<int32_t>(prefix + "order");
        matrix.table = one.get<uint8_t>(prefix + "table");
        auto up = [](int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; };
        int64_t places = up(matrix.n, OCTAVO_PANEL) * up(matrix.k, std::max<int64_t>(matrix.group, OCTAVO_K_PAD));
        bool codes = matrix.kind == OCTAVO_Q8 || matrix.kind == OCTAVO_Q4;
        data = lines(matrix.kind == OCTAVO_F32 ? places * 4 : matrix.kind == OCTAVO_Q4 ? places / 2 : matrix.kind == OCTAVO_Q8 ? places : places * 2);
        matrix.data = data.get();
        if (!codes) {
            octavo_pack_float(&matrix, one.must(prefix + "values").as<float>(), nullptr);
            return;
        }
        scale = lines(places / matrix.group * 2), offset = lines(places / matrix.group * 2);
        matrix.scale = reinterpret_cast<uint16_t *>(scale.get()), matrix.offset = reinterpret_cast<uint16_t *>(offset.get());
        octavo_pack_codes(&matrix, one.must(prefix + "codes").as<uint8_t>(), one.must(prefix + "scale").as<uint16_t>(),
                          one.must(prefix + "offset").as<uint16_t>(), one.get<int64_t>(prefix + "rows"));
    }
};

using Rows = std::vector<float>;

Expected bits(const std::string &result, const std::string &form, const Rows &rows) {
    const char *begin = reinterpret_cast<const char *>(rows.data());
    return {result, form, "exact", "any", 0, {"f4", {int64_t(rows.size())}, {begin, begin + rows.size() * sizeof(float)}}};
}

// Compares the tokens of a step with the same tokens alone, bit for bit.
void judge_alone(const Case &one, const std::string &title, const std::string &result, const Rows &alone, const Results &results) {
    judge({one.kernel, one.title, {}, {}, {bits(result, "alone", alone)}}, title + ", each alone", results);
}

void multiply(const Case &one, const Matrix &matrix, const float *x, float *y, int64_t rows) {
    if (one.number("gate")) octavo_gate_up(&matrix, one.number("activation"), x, y, rows, rows);
    else octavo_matmul(&matrix, x, y, rows, rows);
}

void run_product(Case &one) {
    Packed packed(one, "");
    Array &counts = one.must("counts"), &x = one.must("x");
    const int64_t k = packed.matrix.k, n = one.number("gate") && one.number("activation") != OCTAVO_GELU ? packed.matrix.n / 2 : packed.matrix.n;
    Rows alone(size_t(x.shape[0] * n));
    for (int64_t row = 0; row < x.shape[0]; row++) multiply(one, packed.matrix, x.as<float>() + row * k, alone.data() + row * n, 1);
    for (int64_t i = 0; i < counts.count(); i += threads_ == 1 ? 1 : std::max<int64_t>(1, counts.count() - 1)) {  // threads share panels, whatever the rows
        int64_t rows = counts.as<int64_t>()[i];
        Rows some(x.as<float>(), x.as<float>() + rows * k);  // so that reading past it shows
        Results results{{"y", Result(size_t(rows * n) * sizeof(float))}};
        multiply(one, packed.matrix, some.data(), results.at("y").as<float>(), rows);
        const std::string title = one.title + ", " + std::to_string(rows) + " rows";
        judge(one, title, results);
        judge_alone(one, title, "y", alone, results);
    }
}

Norm norm_of(Case &one, const std::string &name) {
    return {one.get<float>(name + ".weight"), one.get<float>(name + ".bias"), one.number(name + ".kind"), float(one.real(name + ".eps"))};
}

void run_norm(Case &one) {
    Results results{{"stream", Result(one.must("stream"))}, {"y", Result(one.must("stream").bytes.size())}};
    Norm norm = norm_of(one, "norm");
    octavo_add_norm(results.at("stream").as<float>(), one.get<float>("x"), &norm, results.at("y").as<float>(), one.number("rows"), one.number("size"));
    judge(one, one.title, results);
}

// The experts of a layer.
struct Experts {
    Mixture mixture{};
    std::vector<Packed> packed;

    Experts(Case &one, const std::string &prefix) {
        mixture.count = one.number(prefix + "count"), mixture.chosen = one.number(prefix + "chosen");
        mixture.first = one.number(prefix + "first"), mixture.held = int32_t(one.real(prefix + "held", mixture.count));
        mixture.over_all = one.number(prefix + "over_all"), mixture.normed = one.number(prefix + "normed");
        for (auto [name, matrix] : std::initializer_list<std::pair<const char *, Matrix *>>{
                 {"router.", &mixture.router}, {"experts_gate_up.", &mixture.experts_gate_up}, {"experts_down.", &mixture.experts_down},
                 {"shared_gate_up.", &mixture.shared_gate_up}, {"shared_down.", &mixture.shared_down}, {"shared_gate.", &mixture.shared_gate}})
            if (one.real(prefix + name + "n") > 0) {
                packed.emplace_back(one, prefix + name);
                *matrix = packed.back().matrix;
            }
    }
};

void run_mixture(Case &one) {
    Experts experts(one, "");
    Array &counts = one.must("counts"), &x = one.must("x");
    const int64_t hidden = experts.mixture.router.k;
    auto mix = [&](const float *from, float *to, int64_t tokens) { octavo_mix(&experts.mixture, one.number("activation"), from, to, tokens); };
    Rows alone(size_t(x.count()));
    for (int64_t at = 0; at < x.count(); at += hidden) mix(x.as<float>() + at, alone.data() + at, 1);
    for (int64_t i = 0; i < counts.count(); i++) {
        int64_t tokens = counts.as<int64_t>()[i];
        Rows some(x.as<float>(), x.as<float>() + tokens * hidden);
        Results results{{"y", Result(size_t(tokens * hidden) * sizeof(float))}};
        mix(some.data(), results.at("y").as<float>(), tokens);
        const std::string title = one.title + ", " + std::to_string(tokens) + " tokens";
        judge(one, title, results);
        judge_alone(one, title, "y", alone, results);
    }
}

// Gated DeltaNet. Its states are written, and those of a single layer are results.
struct Recurrence {
    DeltaNet net{};
    std::vector<Packed> packed;
    Result conv, recurrent;

    Recurrence(Case &one, const std::string &prefix) : conv(one.must(prefix + "conv_state")), recurrent(one.must(prefix + "recurrent_state")) {
        net.k_heads = one.number(prefix + "k_heads"), net.v_heads = one.number(prefix + "v_heads");
        net.k_dim = one.number(prefix + "k_dim"), net.v_dim = one.number(prefix + "v_dim"), net.conv_width = one.number(prefix + "conv_width");
        net.conv = one.must(prefix + "conv").as<float>(), net.decay = one.must(prefix + "decay").as<float>();
        net.dt_bias = one.must(prefix + "dt_bias").as<float>(), net.norm = norm_of(one, prefix + "norm");
        net.qkvz.n = 2 * net.k_heads * net.k_dim + 2 * net.v_heads * net.v_dim, net.gates.n = 2 * net.v_heads;
        net.conv_state = conv.as<float>(), net.recurrent_state = recurrent.as<float>();
        if (one.real(prefix + "qkvz.n") == 0) return;  // the products are given
        packed.reserve(2);
        packed.emplace_back(one, prefix + "qkvz."), packed.emplace_back(one, prefix + "gates.");
        net.qkvz = packed[0].matrix, net.gates = packed[1].matrix;
    }
};

void read_states(Case &one, Step &step) {
    step.state_read = one.get<int32_t>("state_read"), step.state_write = one.get<int32_t>("state_write");
    step.first_checkpoint = one.get<int32_t>("first_checkpoint"), step.checkpoints = one.get<int32_t>("checkpoints");
}

// The results of each token in a step of its own, by way of two more slots at the end.
Rows recur_alone(const Recurrence &from, const Step &whole, const float *qkvz, const float *gates) {
    const DeltaNet &net = from.net;
    const size_t v_size = size_t(net.v_heads) * size_t(net.v_dim), inputs = size_t(net.qkvz.n) - v_size, head = size_t(net.k_dim) * v_size;
    Rows conv(net.conv_state, net.conv_state + from.conv.size / sizeof(float)), states(net.recurrent_state, net.recurrent_state + from.recurrent.size / sizeof(float));
    const int32_t slots = int32_t(states.size() / head), start[2] = {0, 1}, none[2] = {0, 0};
    conv.resize(conv.size() + 2 * size_t(net.conv_width - 1) * inputs), states.resize(states.size() + 2 * head);
    DeltaNet one = net;
    one.conv_state = conv.data(), one.recurrent_state = states.data();
    Layer layer{};
    layer.delta_net = &one;
    Model model{};
    model.num_layers = 1, model.layers = &layer;
    Rows out(size_t(whole.query_start[whole.num_rows]) * v_size);
    for (int64_t row = 0; row < whole.num_rows; row++) {
        int32_t read = whole.state_read[row], write = slots;
        for (int64_t token = whole.query_start[row]; token < whole.query_start[row + 1]; token++, read = write, write = slots + (write == slots)) {
            Step step{};
            step.num_tokens = step.num_rows = 1, step.query_start = start;
            step.state_read = &read, step.state_write = &write, step.first_checkpoint = none, step.checkpoints = none;
            octavo_delta_net(&model, 0, &step, qkvz + token * net.qkvz.n, gates + token * net.gates.n, out.data() + size_t(token) * v_size);
        }
    }
    return out;
}

void run_delta_net(Case &one) {
    Recurrence recurrence(one, "");
    Layer layer{};
    layer.delta_net = &recurrence.net;
    Model model{};
    model.num_layers = 1, model.layers = &layer;
    Step step{};
    read_states(one, step);
    step.query_start = one.must("query_start").as<int32_t>(), step.num_rows = int32_t(one.must("query_start").count()) - 1;
    step.num_tokens = step.query_start[step.num_rows];
    const float *qkvz = one.must("qkvz").as<float>(), *gates = one.must("gates").as<float>();
    const Rows alone = recur_alone(recurrence, step, qkvz, gates);
    Results results{{"out", Result(size_t(step.num_tokens) * size_t(recurrence.net.v_heads * recurrence.net.v_dim) * sizeof(float))}};
    octavo_delta_net(&model, 0, &step, qkvz, gates, results.at("out").as<float>());
    results.emplace("conv_state", recurrence.conv), results.emplace("recurrent_state", recurrence.recurrent);
    judge(one, one.title, results);
    judge_alone(one, one.title, "out", alone, results);
}

// A model with the layers of a case, over caches that may be written. Attention alone has no weights.
struct Decoder {
    Model model{};
    Step step{};
    std::vector<Layer> layers;
    std::vector<Packed> packed;
    std::vector<std::unique_ptr<Experts>> experts;
    std::vector<std::unique_ptr<Recurrence>> recurrences;
    Results caches;

    explicit Decoder(Case &one) {
        model.num_layers = one.number("num_layers"), model.hidden = one.number("hidden"), model.vocab = one.number("vocab");
        model.cache_kind = one.number("cache_kind"), model.embed_kind = one.number("embed_kind");
        model.embedding_scale = float(one.real("embedding_scale", 1));
        model.logit_scale = float(one.real("logit_scale", 1)), model.logit_cap = float(one.real("logit_cap"));
        model.embed = one.get<char>("embed"), model.embedding_norm = norm_of(one, "embedding_norm"), model.norm = norm_of(one, "norm");
        for (int i = 0; i < model.num_layers; i++) layers.push_back(layer(one, "layer" + std::to_string(i) + "."));
        model.layers = layers.data();
        if (one.find("head.values") || one.find("head.codes")) model.head = weights(one, "head.");
        step.cache_index = one.must("cache_index").as<int32_t>(), step.positions = one.must("positions").as<int32_t>();
        step.slots = one.must("slots").as<int64_t>();
        step.query_start = one.must("query_start").as<int32_t>(), step.context_len = one.must("context_len").as<int32_t>();
        step.tables = one.must("tables").as<int32_t>(), step.shared_start = one.get<int32_t>("shared_start");
        step.shared_nodes = reinterpret_cast<const SharedNode *>(one.get<int32_t>("shared_nodes")), step.shared_rows = one.get<int32_t>("shared_rows");
        read_states(one, step);
        step.token_ids = one.get<int64_t>("token_ids"), step.sample_index = one.get<int64_t>("sample_index");
        step.num_tokens = int32_t(one.must("positions").count()), step.num_rows = int32_t(one.must("context_len").count());
        step.table_width = int32_t(one.must("tables").shape[1]);
        step.num_samples = one.find("sample_index") ? int32_t(one.find("sample_index")->count()) : 0;
    }

private:
    Matrix weights(Case &one, const std::string &prefix) {
        packed.emplace_back(one, prefix);
        return packed.back().matrix;
    }
    void *cache(Case &one, const std::string &prefix, const std::string &name) {
        if (!one.find(prefix + name)) return nullptr;
        std::string key = prefix == "layer0." ? name : prefix + name;  // that of a single layer is a result
        return caches.emplace(key, Result(one.must(prefix + name))).first->second.as<void>();
    }
    Layer layer(Case &one, const std::string &prefix) {
        Layer made{};
        made.attention_norm = norm_of(one, prefix + "attention_norm"), made.mlp_norm = norm_of(one, prefix + "mlp_norm");
        made.q_norm = norm_of(one, prefix + "q_norm"), made.k_norm = norm_of(one, prefix + "k_norm");
        made.k_cache = cache(one, prefix, "k_cache"), made.v_cache = cache(one, prefix, "v_cache");
        made.k_scale = static_cast<float *>(cache(one, prefix, "k_scale")), made.v_scale = static_cast<float *>(cache(one, prefix, "v_scale"));
        made.heads = one.number("heads"), made.kv_heads = one.number("kv_heads"), made.head_dim = one.number("head_dim");
        made.block_size = one.number("block_size"), made.attention_scale = float(one.real("attention_scale"));
        made.window = one.number(prefix + "window"), made.rotary_dim = int32_t(one.real(prefix + "rotary_dim", made.head_dim));
        made.cos = one.get<float>(prefix + "cos"), made.sin = one.get<float>(prefix + "sin"), made.sinks = one.get<float>(prefix + "sinks");
        made.alibi = one.get<float>(prefix + "alibi"), made.parallel = one.number("parallel");
        made.output_gate = one.number(prefix + "output_gate");
        made.whole_norm = one.number(prefix + "whole_norm"), made.soft_cap = float(one.real(prefix + "soft_cap"));
        made.residual_scale = float(one.real("residual_scale", 1)), made.activation = one.number("activation");
        made.attention_after_norm = norm_of(one, prefix + "attention_after_norm"), made.mlp_after_norm = norm_of(one, prefix + "mlp_after_norm");
        if (one.real(prefix + "output.n") == 0) return made;
        made.output = weights(one, prefix + "output.");
        if (one.real(prefix + "delta_net.k_heads") > 0) {
            recurrences.push_back(std::make_unique<Recurrence>(one, prefix + "delta_net."));
            made.delta_net = &recurrences.back()->net;
        } else {
            made.qkv = weights(one, prefix + "qkv.");
        }
        if (one.real(prefix + "mixture.count") > 0) {
            experts.push_back(std::make_unique<Experts>(one, prefix + "mixture."));
            made.mixture = &experts.back()->mixture;
        } else {
            made.gate_up = weights(one, prefix + "gate_up."), made.down = weights(one, prefix + "down.");
        }
        return made;
    }
};

void run_write(Case &one) {
    Decoder decoder(one);
    Result qkv(one.must("qkv"));
    octavo_write(&decoder.model, 0, &decoder.step, qkv.as<float>());
    decoder.caches.emplace("qkv", std::move(qkv));
    judge(one, one.title, decoder.caches);
}

// The attention of a token in a step of its own, over the same caches.
void attend_alone(const Decoder &decoder, int64_t row, int64_t token, const float *qkv, float *out) {
    int32_t start[2] = {0, 1}, length = decoder.step.cache_index[token] + 1;
    Step step{};
    step.num_tokens = step.num_rows = 1, step.table_width = decoder.step.table_width;
    step.cache_index = decoder.step.cache_index + token, step.query_start = start, step.context_len = &length;
    step.tables = decoder.step.tables + row * step.table_width;
    octavo_attend(&decoder.model, 0, &step, qkv, out);
}

void run_attend(Case &one) {
    Decoder decoder(one);
    const Step &step = decoder.step;
    const Layer &layer = decoder.layers[0];
    const int64_t width = layer.heads * layer.head_dim, read = one.must("qkv").count() / step.num_tokens;
    const float *qkv = one.must("qkv").as<float>();
    Results results{{"out", Result(size_t(step.num_tokens * width) * sizeof(float))}};
    octavo_attend(&decoder.model, 0, &step, qkv, results.at("out").as<float>());
    judge(one, one.title, results);
    Rows alone(size_t(step.num_tokens * width));
    for (int64_t row = 0; row < step.num_rows; row++)
        for (int64_t token = step.query_start[row]; token < step.query_start[row + 1]; token++)
            attend_alone(decoder, row, token, qkv + token * read, alone.data() + token * width);
    judge_alone(one, one.title, "out", alone, results);
}

// The values of all heads of some tokens, from the product `down`, and their weighted latents before.
Rows through_latents(const Model &model, const Step &step, const float *down, float *latents) {
    const Layer &layer = model.layers[0];
    Rows q_and_key(size_t(step.num_tokens * (layer.heads + 1) * layer.head_dim)), values(size_t(step.num_tokens * layer.heads * layer.latent->value_dim));
    octavo_absorb(&model, 0, down, q_and_key.data(), step.num_tokens);
    octavo_write(&model, 0, &step, q_and_key.data());
    octavo_attend(&model, 0, &step, q_and_key.data(), latents);
    octavo_expand(&model, 0, latents, values.data(), step.num_tokens);
    return values;
}

void run_latent(Case &one) {
    Decoder decoder(one);
    const Step &step = decoder.step;
    Layer &layer = decoder.layers[0];
    const Packed k_up(one, "k_up."), v_up(one, "v_up.");
    const bool ranked = one.real("q_up.n") > 0;
    std::vector<Packed> q_up;
    if (ranked) q_up.emplace_back(one, "q_up.");
    Latent latent{};
    latent.k_up = k_up.matrix, latent.v_up = v_up.matrix, latent.plain_dim = one.number("plain_dim"), latent.value_dim = one.number("value_dim");
    if (ranked) latent.q_up = q_up[0].matrix;
    latent.down.n = one.must("down").shape[1], layer.latent = &latent;
    const int64_t width = layer.heads * (layer.head_dim - layer.rotary_dim), values = layer.heads * latent.value_dim;
    const float *down = one.must("down").as<float>();
    Results results{{"latents", Result(size_t(step.num_tokens * width) * sizeof(float))}, {"values", Result(size_t(step.num_tokens * values) * sizeof(float))}};
    const Rows found = through_latents(decoder.model, step, down, results.at("latents").as<float>());
    std::copy(found.begin(), found.end(), results.at("values").as<float>());
    judge(one, one.title, results);
    Rows alone;
    for (int64_t row = 0; row < step.num_rows; row++)
        for (int64_t token = step.query_start[row]; token < step.query_start[row + 1]; token++) {
            int32_t start[2] = {0, 1}, length = step.cache_index[token] + 1;
            Step own{};
            own.num_tokens = own.num_rows = 1, own.table_width = step.table_width, own.query_start = start, own.context_len = &length;
            own.cache_index = step.cache_index + token, own.positions = step.positions + token, own.slots = step.slots + token;
            own.tables = step.tables + row * step.table_width;
            Rows latents(static_cast<size_t>(width));
            const Rows made = through_latents(decoder.model, own, down + token * latent.down.n, latents.data());
            alone.insert(alone.end(), made.begin(), made.end());
        }
    judge_alone(one, one.title, "values", alone, results);
}

Rows product(const Matrix &matrix, const Rows &x, int64_t tokens) {
    Rows y(x.size() / size_t(matrix.k) * size_t(matrix.n));
    octavo_matmul(&matrix, x.data(), y.data(), int64_t(x.size()) / matrix.k, tokens);
    return y;
}

// What a step must give, bit for bit: its parts called one after the other, which have cases of their own.
struct Parts {
    Decoder decoder;
    const Model &model = decoder.model;
    int64_t tokens = decoder.step.num_tokens;
    Rows stream, added, normed, hidden, logits;

    explicit Parts(Case &one) : decoder(one), stream(one.must("embedded").as<float>(), one.must("embedded").as<float>() + one.must("embedded").count()) {
        normed.resize(stream.size());
        norm(stream, {}, model.embedding_norm, stream);
        for (int i = 0; i < model.num_layers; i++) {
            const Layer &layer = model.layers[i];
            add(layer.attention_norm);
            Rows attended(size_t(tokens * layer.output.k));
            if (layer.delta_net) {
                const Rows qkvz = product(layer.delta_net->qkvz, normed, tokens), gates = product(layer.delta_net->gates, normed, tokens);
                octavo_delta_net(&model, i, &decoder.step, qkvz.data(), gates.data(), attended.data());
            } else {
                Rows qkv = product(layer.qkv, normed, tokens);
                octavo_write(&model, i, &decoder.step, qkv.data());
                octavo_attend(&model, i, &decoder.step, qkv.data(), attended.data());
            }
            Rows beside = product(layer.output, attended, tokens);
            if (layer.parallel) {
                const Rows made = mlp(layer);
                for (size_t j = 0; j < made.size(); j++) beside[j] += made[j];
                settle(layer, beside, layer.mlp_after_norm);
                continue;
            }
            settle(layer, beside, layer.attention_after_norm);
            add(layer.mlp_norm);
            settle(layer, mlp(layer), layer.mlp_after_norm);
        }
        add(model.norm);
        hidden = normed;
        Rows sampled;
        for (int i = 0; i < decoder.step.num_samples; i++) {
            auto row = hidden.begin() + decoder.step.sample_index[i] * model.hidden;
            sampled.insert(sampled.end(), row, row + model.hidden);
        }
        logits = product(model.head, sampled, tokens);
        octavo_cap_logits(&model, logits.data(), int64_t(logits.size()));
    }

private:
    void norm(Rows &rows, const Rows &more, const Norm &by, Rows &y) {
        octavo_add_norm(rows.data(), more.empty() ? nullptr : more.data(), &by, y.data(), tokens, model.hidden);
    }
    void add(const Norm &by) { norm(stream, added, by, normed); }
    void settle(const Layer &layer, Rows rows, const Norm &by) {
        norm(rows, {}, by, rows);
        if (layer.residual_scale != 1)
            for (float &number : rows) number *= layer.residual_scale;
        added = std::move(rows);
    }
    Rows mlp(const Layer &layer) {
        Rows y(layer.mixture ? normed.size() : size_t(tokens * layer.down.k));
        if (layer.mixture) octavo_mix(layer.mixture, layer.activation, normed.data(), y.data(), tokens);
        else octavo_gate_up(&layer.gate_up, layer.activation, normed.data(), y.data(), tokens, tokens);
        return layer.mixture ? y : product(layer.down, y, tokens);
    }
};

void run_step(Case &one) {
    Decoder decoder(one);
    size_t tokens = size_t(decoder.step.num_tokens), samples = size_t(decoder.step.num_samples);
    Results results{{"hidden", Result(tokens * size_t(decoder.model.hidden) * sizeof(float))},
                    {"logits", Result(samples * size_t(decoder.model.vocab) * sizeof(float))},
                    {"best", Result(samples * sizeof(int64_t))}};
    decoder.step.hidden = results.at("hidden").as<float>(), decoder.step.logits = results.at("logits").as<float>();
    decoder.step.best = results.at("best").as<int64_t>();
    octavo_step(&decoder.model, &decoder.step);
    if (!one.expected.empty()) {
        judge(one, one.title, results);
        if (!one.find("embedded")) return;
    }
    Parts parts(one);
    Case by_parts{one.kernel, one.title, {}, {}, {bits("hidden", "parts", parts.hidden), bits("logits", "parts", parts.logits)}};
    judge(by_parts, one.title + ", by its parts", results);
}

void run_draw(Case &one) {
    Array &logits = one.must("logits");
    Results results{{"ids", Result(size_t(logits.shape[0]) * sizeof(int64_t))}};
    Draws draws{logits.shape[0], logits.shape[1], logits.as<float>(), one.must("temperature").as<float>(), one.must("top_p").as<float>(),
                one.must("min_p").as<float>(), one.must("top_k").as<int64_t>(), one.must("noise").as<int64_t>(),
                one.must("positions").as<int64_t>(), results.at("ids").as<int64_t>()};
    octavo_draw(&draws);
    judge(one, one.title, results);
}

void run_rank(Case &one) {
    Array &logits = one.must("logits");
    Results results;
    for (const Expected &each : one.expected) results.emplace(each.result, Result(each.values.bytes.size()));
    int64_t rows = logits.shape[0], count = int64_t(results.at("near").size / sizeof(float)) / rows;
    Ranking ranking{rows, logits.shape[1], count, logits.as<float>(), one.must("ids").as<int64_t>(), results.at("chosen").as<float>(),
                    results.at("ranks").as<int64_t>(), results.at("totals").as<int64_t>(), results.at("near").as<float>(),
                    results.at("near_ids").as<int64_t>()};
    octavo_rank(&ranking);
    judge(one, one.title, results);
}

void run_noise(Case &one) {
    Results results{{"numbers", Result(one.expected.at(0).values.bytes.size())}};
    octavo_uniform(one.must("noise").as<int64_t>(), int64_t(one.real("position")), results.at("numbers").as<float>(), one.expected[0].values.count());
    judge(one, one.title, results);
}

const std::map<std::string, void (*)(Case &)> KERNELS = {
    {"delta_net", run_delta_net}, {"latent", run_latent},
    {"product", run_product}, {"gate_up", run_product}, {"mixture", run_mixture}, {"norm", run_norm}, {"write", run_write}, {"attend", run_attend},
    {"step", run_step},       {"argmax", run_step},     {"draw", run_draw},       {"rank", run_rank}, {"noise", run_noise}};

void run_file(const char *path) {
    std::ifstream file(path, std::ios::binary);
    std::string first;
    if (!std::getline(file, first) || first != "octavo cases 1") give_up(std::string(path) + " is no file of cases");
    for (Case one; read_case(file, one);) {
        if (!KERNELS.count(one.kernel)) give_up("no kernel is called " + one.kernel);
        for (threads_ = 1; threads_ <= 2; threads_++) {
            octavo_set_threads(threads_);
            KERNELS.at(one.kernel)(one);
        }
    }
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 2) give_up("usage: driver CASES");
    printf("built:");
    for (int level = 0; octavo_level_name(level); level++) printf(" %s", octavo_level_name(level));
    printf("; this machine runs up to %s\n", octavo_level_name(octavo_cpu_level()));
    for (int level = 0; level <= octavo_cpu_level(); level++) {
        octavo_set_level(level);
        level_ = octavo_level_name(level);
        worst_.clear();
        run_file(arguments[1]);
        for (const auto &[kernel, worst] : worst_) {
            printf("%s: %s: %d passed, %d failed", level_.c_str(), kernel.c_str(), worst.passed, worst.failed);
            for (const auto &[what, error] : worst.errors)
                if (error.first > 0) printf("; %s off by at most %.1e (%.1e)", what.c_str(), error.first, error.second);
            printf("\n");
        }
        fflush(stdout);
    }
    octavo_set_threads(1);
    if (passed_ + failed_ == 0) give_up("there are no cases in it");
    printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ ? 1 : 0;
}
