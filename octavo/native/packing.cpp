// Packs weights into panels, once at load, and unpacks single rows. octavo.h draws the layouts.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "dispatch.h"
#include "pool.h"
#include "scalar.h"

namespace octavo {

const int64_t P = OCTAVO_PANEL;

// Unpacks row `row` of packed weights to floats.
void unpack_row(const Matrix &matrix, int64_t row, float *to) {
    int64_t stride = padded(matrix), panel = row / P, lane = row % P;
    for (int64_t k = 0; k < matrix.k; k++) {
        int64_t place = panel * stride * P;
        float value;
        if (matrix.kind == OCTAVO_F32) {
            value = static_cast<const float *>(matrix.data)[place + k * P + lane];
        } else if (matrix.kind == OCTAVO_BF16) {
            value = bf16_to_float(static_cast<const uint16_t *>(matrix.data)[place + k / 2 * 2 * P + 2 * lane + k % 2]);
        } else if (matrix.kind == OCTAVO_F16) {
            value = f16_to_float(static_cast<const uint16_t *>(matrix.data)[place + k * P + lane]) * matrix.factor;
        } else {
            const uint8_t *codes = static_cast<const uint8_t *>(matrix.data);
            int code = matrix.kind == OCTAVO_Q8 ? codes[place + k / 4 * 4 * P + 4 * lane + k % 4]
                                                : codes[place / 2 + k / 8 * 4 * P + 4 * lane + k % 4] >> (k & 4) & 15;
            if (matrix.table) code = matrix.table[code];
            int64_t scale = (panel * (stride / matrix.group) + k / matrix.group) * P + lane;
            value = (f16_to_float(matrix.scale[scale]) * float(code) + f16_to_float(matrix.offset[scale])) * matrix.factor;
        }
        to[matrix.order ? matrix.order[k] : k] = value;
    }
}

// Returns the source row for row `lane` of a panel, or -1.
static int64_t row_of(const Matrix &matrix, const int64_t *rows, int64_t panel, int64_t lane) {
    int64_t n = panel * P + lane;
    return n >= matrix.n ? -1 : rows ? rows[n] : n;
}

static void pack_float(Matrix &matrix, const float *weights, const int64_t *rows, int64_t panel) {
    const int64_t stride = padded(matrix);
    for (int64_t lane = 0; lane < P; lane++) {
        const int64_t n = row_of(matrix, rows, panel, lane);
        for (int64_t k = 0; k < stride; k++) {
            float value = n >= 0 && k < matrix.k ? weights[n * matrix.k + k] / matrix.factor : 0.0f;
            if (matrix.kind == OCTAVO_F32) ((float *)matrix.data)[(panel * stride + k) * P + lane] = value;
            else if (matrix.kind == OCTAVO_F16) ((uint16_t *)matrix.data)[(panel * stride + k) * P + lane] = float_to_f16(value);
            else ((uint16_t *)matrix.data)[(panel * stride + k / 2 * 2) * P + 2 * lane + k % 2] = float_to_bf16(value);
        }
    }
}

// Returns codes [k, k + 4) of a row in one word, with zeros after its end.
static uint32_t quad(const uint8_t *codes, int64_t k, int64_t size) {
    uint32_t word = 0;
    if (k + 4 <= size) memcpy(&word, codes + k, 4);
    else if (k < size) memcpy(&word, codes + k, size_t(size - k));
    return word;
}

// Packs row `lane` of a panel. `row`: its codes; null: zeros
static void pack_row(Matrix &matrix, const uint8_t *row, int64_t panel, int64_t lane) {
    const int64_t stride = padded(matrix), size = row ? matrix.k : 0;
    uint8_t *to = (uint8_t *)matrix.data + panel * stride * P / (matrix.kind == OCTAVO_Q8 ? 1 : 2) + 4 * lane;
    for (int64_t k = 0; k < stride; to += 4 * P) {
        uint32_t word = quad(row, k, size);
        k += 4;
        if (matrix.kind == OCTAVO_Q4) {
            word |= quad(row, k, size) << 4;
            k += 4;
        }
        memcpy(to, &word, 4);
    }
}

static void pack_codes(Matrix &matrix, const uint8_t *codes, const uint16_t *scale, const uint16_t *offset, const int64_t *rows, int64_t panel) {
    const int64_t groups = padded(matrix) / matrix.group, own = (matrix.k + matrix.group - 1) / matrix.group;
    for (int64_t lane = 0; lane < P; lane++) {
        const int64_t n = row_of(matrix, rows, panel, lane);
        for (int64_t g = 0; g < groups; g++) {
            bool there = n >= 0 && g < own;
            ((uint16_t *)matrix.scale)[(panel * groups + g) * P + lane] = there ? scale[n * own + g] : 0;
            ((uint16_t *)matrix.offset)[(panel * groups + g) * P + lane] = there ? offset[n * own + g] : 0;
        }
        pack_row(matrix, n < 0 ? nullptr : codes + n * matrix.k, panel, lane);
    }
}

// -- unpacks blocks of GGUF files to codes, by the layouts in octavo/kernels/reference/dequant.py

static float half_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    return f16_to_float(half);
}

// Splits `count` bytes: the lower halves are codes, the upper halves codes that are `apart` positions further.
static void nibbles(const uint8_t *bytes, int count, uint8_t *codes, int apart) {
    for (int i = 0; i < count; i++) codes[i] = bytes[i] & 15;
    for (int i = 0; i < count; i++) codes[apart + i] = bytes[i] >> 4;
}

static void q4_0_scales(const uint8_t *from, float *scale, float *offset) {
    *scale = half_at(from);
    *offset = *scale * -8;
}

static void q4_0_codes(const uint8_t *from, uint8_t *codes) { nibbles(from + 2, 16, codes, 16); }

static void q4_1_scales(const uint8_t *from, float *scale, float *offset) {
    *scale = half_at(from);
    *offset = half_at(from + 2);
}

static void q4_1_codes(const uint8_t *from, uint8_t *codes) { nibbles(from + 4, 16, codes, 16); }

static void q8_0_scales(const uint8_t *from, float *scale, float *offset) {
    *scale = half_at(from);
    *offset = *scale * -128;
}

static void q8_0_codes(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 32; i++) codes[i] = from[2 + i] ^ 128;
}

static void q45_k_scales(const uint8_t *from, float *scale, float *offset) {
    const float d = half_at(from), m = -half_at(from + 2);
    const uint8_t *packed = from + 4;
    for (int i = 0; i < 4; i++) {
        scale[i] = d * float(packed[i] & 63);
        offset[i] = m * float(packed[4 + i] & 63);
        scale[4 + i] = d * float((packed[8 + i] & 15) | packed[i] >> 6 << 4);
        offset[4 + i] = m * float(packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4);
    }
}

static void q4_k_codes(const uint8_t *from, uint8_t *codes) {
    for (int row = 0; row < 4; row++) nibbles(from + 16 + 32 * row, 32, codes + 64 * row, 32);
}

static void q5_k_codes(const uint8_t *from, uint8_t *codes) {
    const uint8_t *tops = from + 16;
    for (int row = 0; row < 4; row++) nibbles(from + 48 + 32 * row, 32, codes + 64 * row, 32);
    for (int run = 0; run < 8; run++)
        for (int i = 0; i < 32; i++) codes[32 * run + i] |= uint8_t((tops[i] >> run & 1) << 4);
}

static void q6_k_scales(const uint8_t *from, float *scale, float *offset) {
    const float d = half_at(from + 208);
    for (int run = 0; run < 16; run++) {
        scale[run] = d * float(int8_t(from[192 + run]));
        offset[run] = scale[run] * -32;
    }
}

static void q6_k_codes(const uint8_t *from, uint8_t *codes) {
    for (int row = 0; row < 2; row++, codes += 128) {
        nibbles(from + 64 * row, 64, codes, 64);
        const uint8_t *tops = from + 128 + 32 * row;
        for (int run = 0; run < 4; run++)
            for (int i = 0; i < 32; i++) codes[32 * run + i] |= uint8_t((tops[i] >> 2 * run & 3) << 4);
    }
}

struct BlockKind {
    int64_t bytes, codes, runs;  // per block; a run shares a scale and an offset
    void (*scales)(const uint8_t *from, float *scale, float *offset);
    void (*unpack)(const uint8_t *from, uint8_t *codes);
};

static const BlockKind BLOCK_KINDS[] = {
    {18, 32, 1, q4_0_scales, q4_0_codes},      {20, 32, 1, q4_1_scales, q4_1_codes},      {34, 32, 1, q8_0_scales, q8_0_codes},
    {144, 256, 8, q45_k_scales, q4_k_codes}, {176, 256, 8, q45_k_scales, q5_k_codes}, {210, 256, 16, q6_k_scales, q6_k_codes},
};

struct Unpacked {
    uint8_t *codes;
    float *scale, *offset;
};

static void unpack_block(const BlockKind &kind, const uint8_t *blocks, int64_t i, Unpacked to) {
    kind.scales(blocks + i * kind.bytes, to.scale + i * kind.runs, to.offset + i * kind.runs);
    kind.unpack(blocks + i * kind.bytes, to.codes + i * kind.codes);
}

// The concatenated rows of several tensors, each of its own kind.
struct Blocks {
    const uint8_t *const *tensors;
    const int64_t *rows;  // per tensor
    const int32_t *kinds;
};

// Unpacks one row to codes [k] and its scales and offsets. Returns the number of runs.
static int64_t unpack_blocks(const Blocks &blocks, int64_t row, int64_t k, Unpacked to) {
    int part = 0;
    for (; row >= blocks.rows[part]; part++) row -= blocks.rows[part];
    const BlockKind &one = BLOCK_KINDS[blocks.kinds[part]];
    const int64_t count = k / one.codes;
    const uint8_t *from = blocks.tensors[part] + row * count * one.bytes;
    for (int64_t i = 0; i < count; i++) unpack_block(one, from, i, to);
    return count * one.runs;
}

// Writes scales or offsets of a row's runs to the lane at `to`, for all groups of the matrix: a run may be several groups.
static void pack_runs(const Matrix &matrix, const float *numbers, int64_t runs, uint16_t *to) {
    uint16_t halves[16];
    const int64_t groups = padded(matrix) / matrix.group, each = runs ? matrix.k / matrix.group / runs : 0;
    const float inverse = 1 / matrix.factor;  // exact, as the factor is a power of two
    const uint16_t *end = to + groups * P;
    for (int64_t first = 0; first < runs; first += 16) {
        const int64_t count = std::min<int64_t>(16, runs - first);
        for (int64_t i = 0; i < count; i++) halves[i] = float_to_f16(numbers[first + i] * inverse);
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < each; j++, to += P) *to = halves[i];
    }
    for (; to < end; to += P) *to = 0;
}

static void pack_blocks(Matrix &matrix, const Blocks &blocks, const int64_t *rows, int64_t panel, Unpacked row) {
    const int64_t start = padded(matrix) / matrix.group * panel * P;
    for (int64_t lane = 0; lane < P; lane++) {
        const int64_t n = row_of(matrix, rows, panel, lane), runs = n < 0 ? 0 : unpack_blocks(blocks, n, matrix.k, row);
        pack_runs(matrix, row.scale, runs, (uint16_t *)matrix.scale + start + lane);
        pack_runs(matrix, row.offset, runs, (uint16_t *)matrix.offset + start + lane);
        pack_row(matrix, n < 0 ? nullptr : row.codes, panel, lane);
    }
}

// Dequantises one block. codes: a buffer for the codes of a block
static void block_floats(const BlockKind &kind, const uint8_t *block, uint8_t *codes, float *to) {
    float scale[16], offset[16];
    kind.scales(block, scale, offset);
    kind.unpack(block, codes);
    const int64_t size = kind.codes / kind.runs;
    for (int64_t run = 0; run < kind.runs; run++, codes += size, to += size)
        for (int64_t i = 0; i < size; i++) to[i] = scale[run] * float(codes[i]) + offset[run];
}

// Converts numbers to another type. Numbers too large for float16 become infinite.
static void narrow(const float *from, int64_t count, int kind, void *to) {
    if (kind == OCTAVO_F32) memcpy(to, from, size_t(count) * 4);
    for (int64_t i = 0; kind == OCTAVO_BF16 && i < count; i++) ((uint16_t *)to)[i] = float_to_bf16(from[i]);
    for (int64_t i = 0; kind == OCTAVO_F16 && i < count; i++)
        ((uint16_t *)to)[i] = float_to_f16(from[i] > 0x1p16f ? 0x1p16f : from[i] < -0x1p16f ? -0x1p16f : from[i]);
}

// Returns the largest of the results of all threads.
static float largest_of(const std::function<float(int)> &body) {
    std::vector<float> found(size_t(pool().threads()));
    together([&](int thread) { found[size_t(thread)] = body(thread); });
    return *std::max_element(found.begin(), found.end());
}

}  // namespace octavo

using namespace octavo;

extern "C" {

void octavo_pack_float(Matrix *matrix, const float *weights, const int64_t *rows) {
    Turn turn;
    together([&](int thread) {
        Range mine = share(panels(matrix->n), thread, pool().threads());
        for (int64_t panel = mine.begin; panel < mine.end; panel++) pack_float(*matrix, weights, rows, panel);
    });
}

void octavo_pack_codes(Matrix *matrix, const uint8_t *codes, const uint16_t *scale, const uint16_t *offset, const int64_t *rows) {
    Turn turn;
    together([&](int thread) {
        Range mine = share(panels(matrix->n), thread, pool().threads());
        for (int64_t panel = mine.begin; panel < mine.end; panel++) pack_codes(*matrix, codes, scale, offset, rows, panel);
    });
}

void octavo_unpack_blocks(int kind, const uint8_t *blocks, int64_t count, uint8_t *codes, float *scale, float *offset) {
    Turn turn;
    const BlockKind &one = BLOCK_KINDS[kind];
    together([&](int thread) {
        Range mine = share(count, thread, pool().threads());
        for (int64_t i = mine.begin; i < mine.end; i++) unpack_block(one, blocks, i, Unpacked{codes, scale, offset});
    });
}

void octavo_halves(const float *numbers, int64_t count, float factor, uint16_t *halves) {
    Turn turn;
    together([&](int thread) {
        Range mine = share(count, thread, pool().threads());
        for (int64_t i = mine.begin; i < mine.end; i++) halves[i] = float_to_f16(numbers[i] / factor);
    });
}

// Returns the largest |scale| or |offset| of some blocks, infinity if one is NaN.
float octavo_block_range(int kind, const uint8_t *blocks, int64_t count) {
    Turn turn;
    const BlockKind &one = BLOCK_KINDS[kind];
    return largest_of([&](int thread) {
        float scale[16], offset[16], largest = 0;
        Range mine = share(count, thread, pool().threads());
        for (int64_t i = mine.begin; i < mine.end; i++) {
            one.scales(blocks + i * one.bytes, scale, offset);
            for (int64_t run = 0; run < one.runs; run++) {
                float size = std::max(std::abs(scale[run]), std::abs(offset[run]));
                bool number = std::isfinite(scale[run]) && std::isfinite(offset[run]);
                largest = number ? std::max(largest, size) : INFINITY;
            }
            if (std::isinf(largest)) break;
        }
        return largest;
    });
}

void octavo_pack_blocks(Matrix *matrix, const uint8_t *const *tensors, const int64_t *sizes, const int32_t *kinds, const int64_t *rows) {
    Turn turn;
    const Blocks blocks{tensors, sizes, kinds};
    together([&](int thread) {
        std::vector<uint8_t> codes(size_t(matrix->k));
        std::vector<float> scale(size_t(matrix->k / 16)), offset(size_t(matrix->k / 16));
        Range mine = share(panels(matrix->n), thread, pool().threads());
        for (int64_t panel = mine.begin; panel < mine.end; panel++)
            pack_blocks(*matrix, blocks, rows, panel, Unpacked{codes.data(), scale.data(), offset.data()});
    });
}

void octavo_block_floats(int kind, const uint8_t *blocks, int64_t count, int to, void *floats) {
    Turn turn;
    const BlockKind &one = BLOCK_KINDS[kind];
    const int64_t bytes = one.codes * (to == OCTAVO_F32 ? 4 : 2);
    together([&](int thread) {
        uint8_t codes[256];
        float values[256];
        Range mine = share(count, thread, pool().threads());
        for (int64_t i = mine.begin; i < mine.end; i++) {
            block_floats(one, blocks + i * one.bytes, codes, values);
            narrow(values, one.codes, to, (uint8_t *)floats + i * bytes);
        }
    });
}
}
