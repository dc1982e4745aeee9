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
            if (matrix.table) code = matrix.table[code];
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
}
