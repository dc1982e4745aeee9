// Which level runs, packing, and the C ABI over both.
#include "dispatch.h"

#include <algorithm>
#include <cstring>

#include "pool.h"
#include "scalar.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

// OCTAVO_WITH_*: which levels the compiler could build, see CMakeLists.txt.
// AMX state is large, so the kernel gives it only to processes that ask, and best before threads start.
[[maybe_unused]] static bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    const int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

int highest_level() {
#if defined(OCTAVO_WITH_AVX2)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) return OCTAVO_PORTABLE;
#if defined(OCTAVO_WITH_AVX512)
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (!wide) return OCTAVO_AVX2;
#if defined(OCTAVO_WITH_AMX)
    unsigned a = 7, b, c = 0, d;
    asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    bool tiles = (d >> 22 & 1) && (d >> 24 & 1);  // amx-bf16, amx-tile
    if (tiles && may_use_tiles()) return OCTAVO_AMX;
#endif
    return OCTAVO_AVX512;
#endif
    return OCTAVO_AVX2;
#endif
    return OCTAVO_PORTABLE;
}

static int level_ = -1;
static Kernels kernels_;

const Kernels &kernels() { return kernels_; }

static void set_level(int level) {
    level_ = std::clamp(level, 0, highest_level());
    fill_portable(kernels_);
#if defined(OCTAVO_WITH_AVX2)
    if (level_ >= OCTAVO_AVX2) fill_avx2(kernels_);
#endif
#if defined(OCTAVO_WITH_AVX512)
    if (level_ >= OCTAVO_AVX512) fill_avx512(kernels_);
#endif
#if defined(OCTAVO_WITH_AMX)
    if (level_ >= OCTAVO_AMX) fill_amx(kernels_);
#endif
}

void together(const std::function<void(int)> &body) {
    if (level_ < 0) set_level(OCTAVO_AMX);
    make_scratch(pool().threads());
    pool().run([&](int thread) {
#if defined(OCTAVO_WITH_AMX)
        if (kernels_.amx) start_tiles();
#endif
        body(thread);
    });
}

// Row `row` of packed weights, as floats.
void unpack_row(const Matrix &matrix, int64_t row, float *to) {
    int64_t stride = padded(matrix), panel = row / OCTAVO_PANEL, lane = row % OCTAVO_PANEL;
    for (int64_t k = 0; k < matrix.k; k++) {
        int64_t place = panel * stride * OCTAVO_PANEL;
        float value;
        if (matrix.kind == OCTAVO_F32) {
            value = static_cast<const float *>(matrix.data)[place + k * OCTAVO_PANEL + lane];
        } else if (matrix.kind == OCTAVO_BF16) {
            value = bf16_to_float(static_cast<const uint16_t *>(matrix.data)[place + k / 2 * 2 * OCTAVO_PANEL + 2 * lane + k % 2]);
        } else {
            const uint8_t *codes = static_cast<const uint8_t *>(matrix.data);
            int code = matrix.kind == OCTAVO_Q8 ? codes[place + k / 4 * 4 * OCTAVO_PANEL + 4 * lane + k % 4]
                                                : codes[place / 2 + k / 8 * 4 * OCTAVO_PANEL + 4 * lane + k % 4] >> (k & 4) & 15;
            int64_t scale = (panel * (stride / matrix.group) + k / matrix.group) * OCTAVO_PANEL + lane;
            value = (f16_to_float(matrix.scale[scale]) * float(code) + f16_to_float(matrix.offset[scale])) * matrix.factor;
        }
        to[matrix.order ? matrix.order[k] : k] = value;
    }
}

static void pack_float(Matrix &matrix, const float *weights, int64_t panel) {
    const int64_t P = OCTAVO_PANEL, stride = padded(matrix);
    for (int64_t k = 0; k < stride; k++)
        for (int64_t lane = 0; lane < P; lane++) {
            int64_t n = panel * P + lane;
            float value = n < matrix.n && k < matrix.k ? weights[n * matrix.k + k] : 0.0f;
            if (matrix.kind == OCTAVO_F32) ((float *)matrix.data)[(panel * stride + k) * P + lane] = value;
            else ((uint16_t *)matrix.data)[(panel * stride + k / 2 * 2) * P + 2 * lane + k % 2] = float_to_bf16(value);
        }
}

static void pack_codes(Matrix &matrix, const uint8_t *codes, const uint16_t *scale, const uint16_t *offset, int64_t panel) {
    const int64_t P = OCTAVO_PANEL, stride = padded(matrix), groups = stride / matrix.group, own = (matrix.k + matrix.group - 1) / matrix.group;
    uint8_t *data = (uint8_t *)matrix.data + (matrix.kind == OCTAVO_Q8 ? panel * stride * P : panel * stride * P / 2);
    memset(data, 0, size_t(matrix.kind == OCTAVO_Q8 ? stride * P : stride * P / 2));
    for (int64_t lane = 0; lane < P; lane++) {
        int64_t n = panel * P + lane;
        for (int64_t g = 0; g < groups; g++) {
            bool there = n < matrix.n && g < own;
            ((uint16_t *)matrix.scale)[(panel * groups + g) * P + lane] = there ? scale[n * own + g] : 0;
            ((uint16_t *)matrix.offset)[(panel * groups + g) * P + lane] = there ? offset[n * own + g] : 0;
        }
        for (int64_t k = 0; n < matrix.n && k < matrix.k; k++) {
            uint8_t code = codes[n * matrix.k + k];
            if (matrix.kind == OCTAVO_Q8) data[k / 4 * 4 * P + 4 * lane + k % 4] = code;
            else data[k / 8 * 4 * P + 4 * lane + k % 4] |= uint8_t(code << (k & 4));
        }
    }
}

}  // namespace octavo

using namespace octavo;

extern "C" {

int octavo_cpu_level(void) { return highest_level(); }
void octavo_set_level(int level) { set_level(level); }
int octavo_level(void) {
    if (level_ < 0) set_level(OCTAVO_AMX);
    return level_;
}
void octavo_set_threads(int threads) { pool().resize(std::max(1, threads)); }
int octavo_threads(void) { return pool().threads(); }

void octavo_step(const Model *model, const Step *step) { run_step(*model, *step); }
void octavo_matmul(const Matrix *matrix, const float *x, float *y, int64_t rows) { multiply_all(*matrix, x, y, rows, false); }
void octavo_gate_up(const Matrix *matrix, const float *x, float *y, int64_t rows) { multiply_all(*matrix, x, y, rows, true); }

void octavo_add_rms_norm(float *stream, const float *x, const float *weight, float eps, float *y, int64_t rows, int64_t size) {
    together([&](int thread) {
        Range mine = share(rows, thread, pool().threads());
        for (int64_t row = mine.begin; row < mine.end; row++)
            kernels_.add_rms_norm(stream + row * size, x ? x + row * size : nullptr, weight, eps, y + row * size, size);
    });
}

void octavo_write(const Model *model, int layer, const Step *step, float *qkv) {
    together([&](int thread) {
        Range mine = share(step->num_tokens, thread, pool().threads());
        for (int64_t token = mine.begin; token < mine.end; token++) kernels_.write(*model, model->layers[layer], *step, qkv, token);
    });
}

void octavo_attend(const Model *model, int layer, const Step *step, const float *qkv, float *out) { attend_all(*model, layer, *step, qkv, out); }

void octavo_pack_float(Matrix *matrix, const float *weights) {
    together([&](int thread) {
        Range mine = share(panels(matrix->n), thread, pool().threads());
        for (int64_t panel = mine.begin; panel < mine.end; panel++) pack_float(*matrix, weights, panel);
    });
}

void octavo_pack_codes(Matrix *matrix, const uint8_t *codes, const uint16_t *scale, const uint16_t *offset) {
    together([&](int thread) {
        Range mine = share(panels(matrix->n), thread, pool().threads());
        for (int64_t panel = mine.begin; panel < mine.end; panel++) pack_codes(*matrix, codes, scale, offset, panel);
    });
}
}
