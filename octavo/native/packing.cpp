// Weights into panels, once at load, and rows out of them again. octavo.h draws the layouts.
#include <cstring>

#include "dispatch.h"
#include "pool.h"
#include "scalar.h"

namespace octavo {

const int64_t P = OCTAVO_PANEL;

// Row `row` of packed weights, as floats.
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
            int64_t scale = (panel * (stride / matrix.group) + k / matrix.group) * P + lane;
            value = (f16_to_float(matrix.scale[scale]) * float(code) + f16_to_float(matrix.offset[scale])) * matrix.factor;
        }
        to[matrix.order ? matrix.order[k] : k] = value;
    }
}

static void pack_float(Matrix &matrix, const float *weights, int64_t panel) {
    const int64_t stride = padded(matrix);
    for (int64_t lane = 0; lane < P; lane++) {
        int64_t n = panel * P + lane;
        for (int64_t k = 0; k < stride; k++) {
            float value = n < matrix.n && k < matrix.k ? weights[n * matrix.k + k] / matrix.factor : 0.0f;
            if (matrix.kind == OCTAVO_F32) ((float *)matrix.data)[(panel * stride + k) * P + lane] = value;
            else if (matrix.kind == OCTAVO_F16) ((uint16_t *)matrix.data)[(panel * stride + k) * P + lane] = float_to_f16(value);
            else ((uint16_t *)matrix.data)[(panel * stride + k / 2 * 2) * P + 2 * lane + k % 2] = float_to_bf16(value);
        }
    }
}

// Codes [k, k + 4) of a row in one word, zeros past its end.
static uint32_t quad(const uint8_t *codes, int64_t k, int64_t size) {
    uint32_t word = 0;
    if (k + 4 <= size) memcpy(&word, codes + k, 4);
    else if (k < size) memcpy(&word, codes + k, size_t(size - k));
    return word;
}

static void pack_codes(Matrix &matrix, const uint8_t *codes, const uint16_t *scale, const uint16_t *offset, const int64_t *rows, int64_t panel) {
    const int64_t stride = padded(matrix), groups = stride / matrix.group, own = (matrix.k + matrix.group - 1) / matrix.group;
    uint8_t *data = (uint8_t *)matrix.data + panel * stride * P / (matrix.kind == OCTAVO_Q8 ? 1 : 2);
    for (int64_t lane = 0; lane < P; lane++) {
        int64_t n = panel * P + lane < matrix.n ? (rows ? rows[panel * P + lane] : panel * P + lane) : -1, size = n < 0 ? 0 : matrix.k;
        for (int64_t g = 0; g < groups; g++) {
            bool there = size && g < own;
            ((uint16_t *)matrix.scale)[(panel * groups + g) * P + lane] = there ? scale[n * own + g] : 0;
            ((uint16_t *)matrix.offset)[(panel * groups + g) * P + lane] = there ? offset[n * own + g] : 0;
        }
        const uint8_t *row = size ? codes + n * matrix.k : nullptr;
        uint8_t *to = data + 4 * lane;
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
}

// -- blocks of GGUF files into codes, as octavo/kernels/reference/dequant.py draws them

struct Block {  // of codes from 0 on, in runs that share a scale and an offset
    uint8_t *codes;
    float *scale, *offset;
};

static float half_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    return f16_to_float(half);
}

// Halves of `count` bytes: the lower ones are codes, the upper ones codes `apart` further on.
static void nibbles(const uint8_t *bytes, int count, uint8_t *codes, int apart) {
    for (int i = 0; i < count; i++) codes[i] = bytes[i] & 15;
    for (int i = 0; i < count; i++) codes[apart + i] = bytes[i] >> 4;
}

static void q4_0(const uint8_t *from, Block to) {
    nibbles(from + 2, 16, to.codes, 16);
    *to.scale = half_at(from);
    *to.offset = *to.scale * -8;
}

static void q4_1(const uint8_t *from, Block to) {
    nibbles(from + 4, 16, to.codes, 16);
    *to.scale = half_at(from);
    *to.offset = half_at(from + 2);
}

static void q8_0(const uint8_t *from, Block to) {
    for (int i = 0; i < 32; i++) to.codes[i] = from[2 + i] ^ 128;
    *to.scale = half_at(from);
    *to.offset = *to.scale * -128;
}

static void k_scales(const uint8_t *from, Block to) {
    const float d = half_at(from), m = -half_at(from + 2);
    const uint8_t *packed = from + 4;
    for (int i = 0; i < 4; i++) {
        to.scale[i] = d * float(packed[i] & 63);
        to.offset[i] = m * float(packed[4 + i] & 63);
        to.scale[4 + i] = d * float((packed[8 + i] & 15) | packed[i] >> 6 << 4);
        to.offset[4 + i] = m * float(packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4);
    }
}

static void q4_k(const uint8_t *from, Block to) {
    k_scales(from, to);
    for (int row = 0; row < 4; row++) nibbles(from + 16 + 32 * row, 32, to.codes + 64 * row, 32);
}

static void q5_k(const uint8_t *from, Block to) {
    k_scales(from, to);
    const uint8_t *tops = from + 16;
    for (int row = 0; row < 4; row++) nibbles(from + 48 + 32 * row, 32, to.codes + 64 * row, 32);
    for (int run = 0; run < 8; run++)
        for (int i = 0; i < 32; i++) to.codes[32 * run + i] |= uint8_t((tops[i] >> run & 1) << 4);
}

static void q6_k(const uint8_t *from, Block to) {
    for (int row = 0; row < 2; row++) {
        uint8_t *codes = to.codes + 128 * row;
        nibbles(from + 64 * row, 64, codes, 64);
        const uint8_t *tops = from + 128 + 32 * row;
        for (int run = 0; run < 4; run++)
            for (int i = 0; i < 32; i++) codes[32 * run + i] |= uint8_t((tops[i] >> 2 * run & 3) << 4);
    }
    const float d = half_at(from + 208);
    for (int run = 0; run < 16; run++) {
        to.scale[run] = d * float(int8_t(from[192 + run]));
        to.offset[run] = to.scale[run] * -32;
    }
}

struct BlockKind {
    int64_t bytes, codes, runs;
    void (*unpack)(const uint8_t *, Block);
};

static const BlockKind BLOCK_KINDS[] = {
    {18, 32, 1, q4_0}, {20, 32, 1, q4_1}, {34, 32, 1, q8_0}, {144, 256, 8, q4_k}, {176, 256, 8, q5_k}, {210, 256, 16, q6_k},
};

}  // namespace octavo

using namespace octavo;

extern "C" {

void octavo_pack_float(Matrix *matrix, const float *weights) {
    together([&](int thread) {
        Range mine = share(panels(matrix->n), thread, pool().threads());
        for (int64_t panel = mine.begin; panel < mine.end; panel++) pack_float(*matrix, weights, panel);
    });
}

void octavo_pack_codes(Matrix *matrix, const uint8_t *codes, const uint16_t *scale, const uint16_t *offset, const int64_t *rows) {
    together([&](int thread) {
        Range mine = share(panels(matrix->n), thread, pool().threads());
        for (int64_t panel = mine.begin; panel < mine.end; panel++) pack_codes(*matrix, codes, scale, offset, rows, panel);
    });
}

void octavo_unpack_blocks(int kind, const uint8_t *blocks, int64_t count, uint8_t *codes, float *scale, float *offset) {
    const BlockKind &one = BLOCK_KINDS[kind];
    together([&](int thread) {
        Range mine = share(count, thread, pool().threads());
        for (int64_t i = mine.begin; i < mine.end; i++)
            one.unpack(blocks + i * one.bytes, Block{codes + i * one.codes, scale + i * one.runs, offset + i * one.runs});
    });
}

void octavo_halves(const float *numbers, int64_t count, float factor, uint16_t *halves) {
    together([&](int thread) {
        Range mine = share(count, thread, pool().threads());
        for (int64_t i = mine.begin; i < mine.end; i++) halves[i] = float_to_f16(numbers[i] / factor);
    });
}
}
