// Which level runs, and the C ABI over it.
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
}
