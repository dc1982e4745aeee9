// The kernels of a CPU level, as a table of functions. Each level starts from the next lower one and replaces the kernels it improves.
//
// Rows of x are prepared once for a product, in the format of its kernel, and then read by all threads:
//
//     FLOAT     unchanged, padded with zeros
//     HALF      float16, at most 1, with a scale for each span of 32 k
//     BF16      rounded to bfloat16
//     INT8      one-byte codes, with a scale for each span of k: 32, or the group of the weights if that is smaller
//
// INT8 is for weights in codes.
#pragma once
#include <cstddef>
#include <cstring>

#include "octavo.h"
#include "scalar.h"

namespace octavo {

enum class Form { FLOAT, HALF, BF16, INT8 };

const int64_t FEW = 16;      // on levels that unpack codes: the largest batch that is multiplied as codes
const int64_t SPAN = 32;     // maximum columns of x that share a scale: with more, one large number would cost too many others their precision

enum class Digits { BYTES, NIBBLES, LOOKED_UP };  // 8-bit codes; 4-bit codes; 4-bit codes with a table of values

inline bool has_codes(const Matrix &matrix) { return matrix.kind == OCTAVO_Q8 || matrix.kind == OCTAVO_Q4; }
inline int64_t span_of(const Matrix &matrix) { return has_codes(matrix) && matrix.group < SPAN ? matrix.group : SPAN; }

struct Rows {                // prepared rows of x: [rows][stride]
    Form form;
    int64_t rows, stride;    // stride: k padded
    float *values;           // FLOAT
    uint16_t *halves;        // HALF and BF16
    int8_t *codes;           // INT8
    float *scale;            // HALF and INT8, [rows][stride / span]: x = scale * stored value
    float *sum;              // INT8, [rows][stride / span]: scale * (sum of codes in the span)
};

struct Target {              // where results go: floats, or bfloat16 if only the next product reads them
    float *values;
    uint16_t *halves;        // or null
    int64_t stride;
};

// Stores results of a row, from column `begin` on.
static inline void put(const float *values, const Target &target, int64_t row, int64_t begin, int64_t count) {
    int64_t place = row * target.stride + begin;
    if (!target.halves) memcpy(target.values + place, values, size_t(count) * sizeof(float));
    else
        for (int64_t i = 0; i < count; i++) target.halves[place + i] = float_to_bf16(values[i]);
}

// Attention of a query is computed piece by piece, and the pieces are joined in the order of their positions. They begin at multiples
// of PIECE, so the result does not depend on the task that computes a piece, or on the other queries there.
const int64_t PIECE = 256;

struct Task {                // attention of one kv head, or of a group of heads over latents, for some queries over keys of one row
    int64_t row, token, queries;      // the row of the keys; the first token, and the number of queries
    const int32_t *tokens;            // or null: the queries are consecutive
    int64_t kv_head;
    int64_t begin, end;               // positions of the context; `begin` is the first of a piece
    int64_t partial;                  // index of its first partial result, or -1: it computes the final result and begins with these parts
    bool joined;                      // its partial result is over all its keys; otherwise there is one for each piece
    const int64_t *places;            // partial results over the keys before it, of the same queries, in order
    int64_t parts;                    // their number

    bool by_piece() const { return partial >= 0 && !joined; }
    int64_t token_of(int64_t query) const { return tokens ? tokens[query] : token + query; }
};

// The first position that a query at `position` may see.
inline int64_t first_seen(const Layer &layer, int64_t position) {
    return layer.window && position >= layer.window ? position - layer.window + 1 : 0;
}

inline float slope_of(const Layer &layer, int64_t head) { return layer.alibi ? layer.alibi[head] : 0.0f; }

// The heads in a row of `qkv`: of q, k and v, and gates; with a latent, of q and the key.
inline int64_t read_heads(const Layer &layer) {
    return layer.latent ? layer.heads + 1 : (layer.output_gate ? 2 : 1) * layer.heads + 2 * layer.kv_heads;
}

// The heads of a key in the cache, and the numbers of a value.
inline int64_t cached_heads(const Layer &layer) { return layer.latent ? 1 : layer.kv_heads; }
inline int64_t value_dim(const Layer &layer) { return layer.latent ? layer.head_dim - layer.rotary_dim : layer.head_dim; }

// The number of columns that the activation makes of a product with gates and ups, or with ups alone.
inline int64_t activated(const Matrix &matrix, int activation) { return activation == OCTAVO_GELU ? matrix.n : matrix.n / 2; }

// The total of a head's weights, relative to its largest score, including that of its sink.
static inline float with_sink(const Layer &layer, int64_t head, float largest, float total) {
    return layer.sinks ? total + fast_exp(layer.sinks[head] - largest) : total;
}

// The product `qkvz` of a step. A step stores it head by head, so that a head's numbers of a row are contiguous, since tokens would be in
// different pages; callers of the C ABI store it token by token.
struct Projected {
    const float *values;
    int64_t tokens;          // or 0: token by token

    // The numbers of a token for a head of `size` numbers, of which the first is in column `begin`.
    const float *at(const DeltaNet &net, int64_t begin, int64_t size, int64_t token) const {
        return tokens ? values + begin * tokens + token * size : values + token * net.qkvz.n + begin;
    }
};

struct Kernels {
    Form (*form)(const Matrix &matrix, int64_t rows);                               // the format for a product of this many rows
    void (*prepare)(const Matrix &matrix, const float *x, const Rows &rows, int64_t row);  // x: one row
    void (*product)(const Matrix &matrix, const Rows &rows, int64_t panel, int64_t end, float *y, int64_t stride, void *scratch);
    void (*gate_up)(const Matrix &matrix, int activation, const Rows &rows, int64_t panel, int64_t end, const Target &y, void *scratch);  // panels of y
    void (*add_norm)(float *stream, const float *x, const Norm &norm, float *y, int64_t size);  // stream += x, if there is x; y: the stream, normed
    void (*cap)(float *values, float scale, float cap, int64_t count);              // cap * tanh(scale * value / cap); cap 0: scale * value
    void (*write)(const Model &model, const Layer &layer, const Step &step, float *qkv, int64_t token);
    void (*attend)(const Model &model, const Layer &layer, const Step &step, const float *qkv, const Target &out, float *partials,
                   const Task &task, void *scratch);
    void (*delta_net)(const DeltaNet &net, const Step &step, const Projected &qkvz, const float *gates, const Target &out, int64_t row, int64_t head,
                      void *scratch);                                               // all tokens of a row in one of its v heads
    int64_t (*argmax)(const float *values, int64_t count);
    void (*uniform)(const int64_t *noise, int64_t position, float *numbers, int64_t count);
    void (*draw)(const Draws &draws, int64_t row, uint32_t *memory);                // memory: row_words(vocab)
    void (*rank)(const Ranking &ranking, int64_t row, uint32_t *memory);
};

const size_t SCRATCH_BYTES = 16 << 20;  // per thread: weights unpacked for large batches, tiles of scores

const int64_t ROW_BLOCK = 128;           // tokens of a row of logits that are processed together
inline int64_t row_blocks(int64_t vocab) { return (vocab + ROW_BLOCK - 1) / ROW_BLOCK; }
inline int64_t row_words(int64_t vocab) { return row_blocks(vocab) * (2 * ROW_BLOCK + 1); }  // the memory that sampling from a row needs

void fill_portable(Kernels &kernels);
void fill_avx2(Kernels &kernels);
void fill_avx512(Kernels &kernels);
void fill_avx512bf16(Kernels &kernels);
void fill_amx(Kernels &kernels);
void fill_neon(Kernels &kernels);
void fill_i8mm(Kernels &kernels);

inline int64_t padded(const Matrix &matrix) {
    int64_t unit = has_codes(matrix) && matrix.group > OCTAVO_K_PAD ? matrix.group : OCTAVO_K_PAD;
    return (matrix.k + unit - 1) / unit * unit;
}
inline int64_t panels(int64_t n) { return (n + OCTAVO_PANEL - 1) / OCTAVO_PANEL; }

}  // namespace octavo
