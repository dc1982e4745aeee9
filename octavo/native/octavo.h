// The C ABI of Octavo's CPU kernels: plain structs of numbers and raw pointers. octavo/kernels/cpu/library.py reads them from this file.
//
//     Matrix        the weights of one product, packed into panels of 16 output rows
//     Layer, Model  a decoder: structs filled once, when the weights are loaded; Mixture: the MLP of an MoE layer; Latent: the products
//                   around latent attention; DeltaNet: a recurrent layer's replacement for attention
//     Step          one step: the arrays of the batch and where results go
//     Draws         rows of logits to sample from; Ranking: rows whose best tokens are requested
//     Group         the ranks that share a model, processes of one host, and the memory through which they communicate
//
// Errors are checked in Python, before the call. Functions that communicate with other ranks may fail, see Group. Functions that need
// buffers return OCTAVO_NO_MEMORY if there is no memory for these, and compute nothing; otherwise 0, if nothing else is said.
//
// Panels. y[m][n] = sum_k x[m][k] * w[n][k]. 16 rows n are interleaved, so that a vector register holds one k, a pair or
// a quad of k for all 16, and K is padded with zeros to a multiple of 64, and of the group:
//
//     F32    [panel][k][16]                  one k
//     F16    [panel][k][16]                  one k; no weight above 1,024, see Matrix.factor
//     BF16   [panel][k / 2][16][2]           a pair: the format of dpbf16, bfdot and an AMX tile of weights
//     Q8     [panel][k / 4][16][4]           a quad of codes, one byte each: the format of dpbusd and sdot
//     Q4     [panel][k / 8][16][4]           two quads in one register: the first in the low nibbles, the second in the high
//
// Codes are unsigned: w = (scale * code + offset) * factor, with one scale and offset (float16) for each of 16 rows and each
// group of k: [panel][k / group][16]. If there is a table, table[code] replaces the code.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { OCTAVO_PANEL = 16, OCTAVO_K_PAD = 64 };
enum { OCTAVO_F32 = 0, OCTAVO_BF16 = 1, OCTAVO_Q8 = 2, OCTAVO_Q4 = 3, OCTAVO_F16 = 4 };  // storage formats of weights
enum { OCTAVO_NO_MEMORY = INT32_MIN };
// Gate functions: silu(gate) * up; gelu(gate) * up with the tanh approximation; (up + 1) * gate * sigmoid(1.702 * gate), with gates
// limited to 7 and ups clamped to [-7, 7]. Without a gate: gelu(up) with the tanh approximation.
enum { OCTAVO_SWIGLU = 0, OCTAVO_GEGLU = 1, OCTAVO_CLAMPED = 2, OCTAVO_GELU = 3 };
enum { OCTAVO_RMS_NORM = 0, OCTAVO_LAYER_NORM = 1 };

typedef struct {
    int32_t kind;
    int32_t group;           // number of k that share a scale: 16, 32, 64 or 128; Q8 and Q4 only
    int64_t n, k;            // as in the model; panels are padded
    const void *data;
    const uint16_t *scale;   // float16
    const uint16_t *offset;  // float16
    float factor;            // factor on all weights: (scale * code + offset) * factor; F16: number * factor
    const float *bias;       // [n] or null
    const int32_t *order;    // [k] or null: the input column of each column of codes
    const uint8_t *table;    // [16] or null: the value of each code; Q4 only
} Matrix;

// x / sqrt(mean(x^2) + eps) * weight + bias; a layer norm subtracts mean(x) from x first.
typedef struct {
    const float *weight;     // null: there is no norm
    const float *bias;       // or null
    int32_t kind;
    float eps;
} Norm;

// A router selects some of many experts for each token, and weights their outputs. In `experts_gate_up` and `experts_down` the rows of
// each expert follow those of the previous one, in the same number of whole panels. A rank may have only some experts: others add nothing.
typedef struct {
    int32_t count, chosen;                   // of all experts; per token
    int32_t first, held;                     // the first expert on this rank, and their number
    int32_t over_all;                        // softmax over the scores of all experts; 0: over those of the chosen ones
    int32_t normed;                          // the weights of the chosen experts are normalised to a sum of 1
    int32_t sigmoid;                         // weights are sigmoids of the scores, not a softmax
    int32_t groups, chosen_groups;           // experts of the best groups alone are chosen. The score of a group is that of its best expert,
                                             // with `sigmoid` the sum of its best two
    float scale;                             // factor on the weights; 0: none
    const float *bias;                       // [count] or null: added to the scores, or to the sigmoids, for the choice but not for the weights
    Matrix router;                           // rows: a score for each expert
    Matrix experts_gate_up, experts_down;    // for each expert, like `gate_up` and `down` of a layer
    Matrix shared_gate_up, shared_down;      // of one more MLP that every token passes through; n is 0: none
    Matrix shared_gate;                      // one row: its sigmoid is the weight of that MLP; n is 0: the weight is 1
} Mixture;

// Gated DeltaNet: each v head of a sequence has a state S [k_dim][v_dim] in place of a cache. The inputs q, k and v are those of the last
// `conv_width` tokens, weighted and added channel by channel, through SiLU; q and k are normed to length 1, and q is divided by the root
// of k_dim. Each k head belongs to v_heads / k_heads consecutive v heads. A token does, in each v head:
//
//     decay = exp(-exp(A) * softplus(a + dt_bias)),  beta = sigmoid(b)
//     d = beta * (v - decay * (S^T k)),  S = decay * S + k d^T,  o = S^T q;  the result is norm(o) * silu(z)
//
// States are in slots, see Step. Slot 0 has zeros: sequences begin there. k_dim and v_dim are multiples of 16, and at most 256.
typedef struct {
    Matrix qkvz;                             // rows: q of all k heads, k of all k heads, v of all v heads, z of all v heads
    Matrix gates;                            // rows: b of all v heads, a of all v heads
    const float *conv;                       // [conv_width][channels], the last row for the current token; channels: the rows of q, k and v
    const float *decay;                      // [v_heads]: -exp(A)
    const float *dt_bias;                    // [v_heads]
    Norm norm;                               // [v_dim], an RMS norm without bias
    float *conv_state;                       // [slots][conv_width - 1][channels]: the last inputs of the convolution, the oldest first
    float *recurrent_state;                  // [slots][v_heads][k_dim][v_dim]
    int32_t k_heads, v_heads, k_dim, v_dim;
    int32_t conv_width;                      // 2 to 8
} DeltaNet;

// Multi-head latent attention: all heads read one key per token, [latent | rotary key], and its first numbers, the latent, are the value.
// q of a head is [plain_dim | rotary_dim]; the first part is multiplied by the head's matrix in `k_up`, to match the latent, and the
// weighted latents of a head by its matrix in `v_up`. In `k_up` and `v_up` the rows of each head follow those of the previous one, in
// whole panels.
typedef struct {
    Matrix down;                             // rows: q of all heads, or what `q_up` reads; the latent; the rotary key
    Matrix q_up;                             // rows: q of all heads. n is 0: `down` computes it
    Matrix k_up;                             // for each head: as many rows as the latent has numbers; k: plain_dim
    Matrix v_up;                             // for each head: value_dim rows; k: the numbers of the latent
    int32_t plain_dim, value_dim;
} Latent;

typedef struct {
    Norm attention_norm, mlp_norm;           // [hidden], of the input of a sub-layer
    Norm attention_after_norm, mlp_after_norm;  // [hidden], of the output of a sub-layer
    Norm q_norm, k_norm;                     // [head_dim]; with `whole_norm`, [heads * head_dim] and [kv_heads * head_dim]; with `latent`: of
                                             // what `q_up` reads, and of the latent
    const float *cos, *sin;                  // [max_len][rotary_dim / 2]
    const float *sinks;                      // [heads] or null: a score that takes part in the softmax of a head but has no value
    const float *alibi;                      // [heads] or null: slope * (position of the key - that of the query) is added to scores
    Matrix qkv;                              // rows: all q heads, all k heads, all v heads; with `output_gate`, a gate for each q head
    Matrix output;
    Matrix gate_up;                          // rows: 16 of gate and 16 of up alternate; without a gate: those of up
    Matrix down;
    const Mixture *mixture;                  // replaces gate_up and down; or null
    const Latent *latent;                    // replaces qkv: rows of q, k and v are then made of q of all heads and one key; or null
    const DeltaNet *delta_net;               // replaces attention: of what follows, only `activation`, `residual_scale` are read; or null
    void *k_cache, *v_cache;                 // [blocks][block_size][kv_heads][head_dim]; with `latent`: one head in k_cache, and no v_cache
    float *k_scale, *v_scale;                // int8 cache only: [blocks][block_size][kv_heads]
    int32_t heads, kv_heads, head_dim;       // with `latent`, kv_heads is the number of groups of heads that are computed together
    int32_t rotary_dim;                      // the number of rotated dimensions at the start of a head, with `latent` at its end, in halves; 0: none
    int32_t whole_norm;                      // q and k are each normed as a whole, not head by head
    int32_t window;                          // 0: unlimited
    int32_t cache_group, block_size;         // its index among the step's block tables, and the tokens of a block there
    int32_t activation;
    float attention_scale;
    float soft_cap;                          // scores become cap * tanh(score / cap); 0: no cap
    float residual_scale;                    // factor on the output of sub-layers
    int32_t parallel;                        // attention and MLP read the same input, which is normed by `attention_norm`; not with `delta_net`
    int32_t output_gate;                     // the result of attention is multiplied by the sigmoid of the gates
} Layer;

// Functions that communicate with other ranks return 0, or the same code on all of them: 1 + rank if that rank did not arrive within
// the time limit, -(1 + rank) if that rank aborted. After that the group cannot be used. One thread of a rank calls at a time, and all
// ranks make the same calls in the same order.
typedef struct {
    void *memory;            // of size octavo_group_bytes(), initially zero, shared by all ranks
    int64_t slot_bytes;      // a multiple of 64: larger data is exchanged in parts
    int32_t rank, size;
    int32_t timeout_ms;      // how long a rank waits for another
} Group;

// A stage of a pipeline has some of the layers. `embed` is read only by the first stage, `norm` and `head` only by the last.
// A rank of a group has some of the heads, of the columns of gate and up, and of the ids. Its `output` and `down` then compute partial
// sums, and only rank 0 has their bias.
typedef struct {
    int32_t num_layers, hidden, vocab;
    int32_t cache_kind;      // OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16 (saturating) or OCTAVO_Q8 (int8 with a scale per token and head)
    int32_t embed_kind;      // OCTAVO_F32, OCTAVO_BF16 or OCTAVO_F16: rows of `embed`; OCTAVO_Q8: rows are unpacked from `head`
    float embedding_scale;   // factor on the rows of `embed`
    float logit_scale;
    float logit_cap;         // logits become cap * tanh(logit / cap) after scaling; 0: no cap
    const Layer *layers;
    const void *embed;       // [vocab_rows][hidden]
    Norm embedding_norm;     // [hidden], of scaled rows of `embed`
    Norm norm;               // [hidden], the last one
    Matrix head;             // n: vocab_rows
    int32_t vocab_start;     // the first id in this rank's part of `embed` and `head`
    int32_t vocab_rows;      // the number of ids in that part; 0: all, on every rank
    const Group *group;      // null: there is one rank
} Model;

// Shared keys: several rows have them in the same blocks. The nodes of a row are contiguous, starting at its first key.
typedef struct {
    int32_t first, count;                              // its rows, in Step.shared_rows
    int32_t begin, end;                                // its keys, by position
} SharedNode;

typedef struct {
    int32_t num_tokens, num_rows, table_width, num_samples;
    int64_t slot_stride, context_stride, table_stride; // from one cache group to the next, in numbers
    const int64_t *token_ids;                          // [tokens]
    const int32_t *cache_index, *positions;            // [tokens]: in the cache, which determines the keys that it reads; for the rotation
    const int64_t *slots;                              // [groups][tokens]
    const int32_t *query_start;                        // [rows + 1]
    const int32_t *context_len;                        // [groups][rows]: positions in the cache after the step
    const int32_t *tables;                             // [groups][rows][table_width]; not read behind a window
    const int32_t *shared_start;                       // [groups + 1] or null: the first node of each cache group
    const SharedNode *shared_nodes;
    const int32_t *shared_rows;                        // of all nodes: rows of one token each
    const int64_t *sample_index;                       // [samples], into tokens
    const int32_t *state_read;                         // [rows]: the state slot before a row's first token; these four are for `delta_net` alone
    const int32_t *state_write;                        // [rows]: receives the state after its last token, and no row reads it; -1: not stored
    const int32_t *first_checkpoint;                   // [rows + 1]: a row's first entry in `checkpoints`
    const int32_t *checkpoints;                        // [checkpoints][2]: end, slot: receives the state before token `end` of the step. Ends
                                                       // of a row are in order, and behind its first token
    const float *received;                             // [tokens][hidden] or null: the stream of the previous stage; null: ids are embedded
    float *passed;                                     // [tokens][hidden] or null: receives the stream, if another stage has the rest
    float *hidden;                                     // [tokens][hidden] after the final norm; unused, like all that follows, if `passed` is set
    float *logits;                                     // [samples][vocab_rows]
    int64_t *best;                                     // [samples]: the id of the largest of these logits, the lower one in a tie
} Step;

// Their rules are defined by the reference, octavo/kernels/reference/sampling.py.
typedef struct {
    int64_t rows, vocab;
    const float *logits;                               // [rows][vocab]
    const float *temperature, *top_p, *min_p;          // [rows]
    const int64_t *top_k;                              // [rows]: 0 = off
    const int64_t *noise;                              // [rows][4]: key, key, stream, high
    const int64_t *positions;                          // [rows]
    int64_t *ids;                                      // [rows]: the sampled ids
} Draws;

typedef struct {
    int64_t rows, vocab, count;                        // count: how many of the best, at most vocab
    const float *logits;                               // [rows][vocab]
    const int64_t *ids;                                // [rows]
    float *chosen;                                     // [rows]: distance of the row's id from the best
    int64_t *ranks;                                    // [rows]: rank of the row's id, from 1
    int64_t *totals;                                   // [rows]: total probability in fixed point, 2^40 for the best token
    float *near;                                       // [rows][count]: distances of the best, in order
    int64_t *near_ids;                                 // [rows][count]
} Ranking;

#pragma GCC visibility push(default)  // everything else in the library is hidden

// Calls from several threads are serialised.

// Levels are numbered from 0, the portable one. Each uses all instructions of the lower ones. Their names depend on the architecture.
const char *octavo_level_name(int level);    // null after the last level of this architecture
int octavo_cpu_level(void);                  // the highest level this machine supports
void octavo_set_level(int level);            // limited to that; applies to every later call
int octavo_level(void);
void octavo_set_threads(int threads);        // starts and stops workers; the caller is one of them
int octavo_threads(void);

int octavo_step(const Model *model, const Step *step);  // otherwise not 0: communication between ranks failed, and there are no results

// Collective operations of ranks.
int64_t octavo_group_bytes(int size, int64_t slot_bytes);                                               // the size of the memory
int octavo_reduce(const Group *group, float *data, int64_t count);                                      // the sum: rank 0 + rank 1 + ...
int octavo_gather(const Group *group, const void *mine, void *all, int64_t bytes);                      // all: [size][bytes]
void octavo_abort(const Group *group);                                                                  // aborts for this rank and ends all waiting

// The parts of a step, for the layer-by-layer path and for tests against the torch references.
// tokens: of the step that the rows belong to, which determines their format on some levels.
int octavo_matmul(const Matrix *matrix, const float *x, float *y, int64_t rows, int64_t tokens);        // y: [rows][n]
int octavo_gate_up(const Matrix *matrix, int activation, const float *x, float *y, int64_t rows, int64_t tokens);   // y: [rows][n / 2]; without a gate: [rows][n]
int octavo_mix(const Mixture *mixture, int activation, const float *x, float *y, int64_t tokens);       // y: [tokens][hidden]
int octavo_add_norm(float *stream, const float *x, const Norm *norm, float *y, int64_t rows, int64_t size);  // see Kernels.add_norm
int octavo_write(const Model *model, int layer, const Step *step, float *qkv);                          // norms, rotates, stores
int octavo_attend(const Model *model, int layer, const Step *step, const float *qkv, float *out);       // out: [tokens][heads * head_dim]; the latents of heads
// down: the product of that name; qkv: [tokens][(heads + 1) * head_dim], not rotated; latents: the result of attention; out: [tokens][heads * value_dim]
int octavo_absorb(const Model *model, int layer, const float *down, float *qkv, int64_t tokens);
int octavo_expand(const Model *model, int layer, const float *latents, float *out, int64_t tokens);
// qkvz, gates: the products of these names; out: [tokens][v_heads * v_dim]
int octavo_delta_net(const Model *model, int layer, const Step *step, const float *qkvz, const float *gates, float *out);

int octavo_cap_logits(const Model *model, float *logits, int64_t count);                                // in place

// Rows are independent of each other and divided among threads.
int octavo_draw(const Draws *draws);
int octavo_rank(const Ranking *ranking);
void octavo_uniform(const int64_t *noise, int64_t position, float *numbers, int64_t count);             // for tokens 0 to count - 1

// Packing, once at load. Sources are row major; `data`, `scale` and `offset` of the matrix are written.
// F32, F16 and BF16: [...][k], divided by the factor; rows: [n], the source row of each row of the matrix, -1 for zeros; null: the same
void octavo_pack_float(Matrix *matrix, const float *weights, const int64_t *rows);
// Q8 and Q4: [...][k], [...][k / group]; rows: likewise
void octavo_pack_codes(Matrix *matrix, const uint8_t *codes, const uint16_t *scale, const uint16_t *offset, const int64_t *rows);

// Unpacks blocks of a GGUF file to codes, and scales and offsets of their runs. kind: an index into BLOCK_KINDS (packing.cpp)
void octavo_unpack_blocks(int kind, const uint8_t *blocks, int64_t count, uint8_t *codes, float *scale, float *offset);
void octavo_halves(const float *numbers, int64_t count, float factor, uint16_t *halves);  // numbers / factor in float16

float octavo_block_range(int kind, const uint8_t *blocks, int64_t count);  // the largest |scale| or |offset|
// Packs blocks directly into panels. tensors: their rows are concatenated; sizes: rows of each; rows: as for codes
void octavo_pack_blocks(Matrix *matrix, const uint8_t *const *tensors, const int64_t *sizes, const int32_t *kinds, const int64_t *rows);

void octavo_block_floats(int kind, const uint8_t *blocks, int64_t count, int to, void *floats);  // to: F32, BF16 or F16

void octavo_struct_sizes(int64_t *sizes);    // [11]: bytes of Matrix, Norm, Mixture, Latent, DeltaNet, Layer, Group, Model, Step, Draws and Ranking

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
