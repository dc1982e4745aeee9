// Selects the level, and implements the C ABI with it.
#include "dispatch.h"

#include <algorithm>
#include <cstring>

#include "pool.h"
#include "scalar.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace octavo {

// --- available levels --------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
// AMX state is large, so the kernel enables it only on request, preferably before threads start.
[[maybe_unused]] static bool may_use_tiles() {
#if defined(__linux__)
    const int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

[[maybe_unused]] static bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
[[maybe_unused]] static bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
[[maybe_unused]] static bool has_avx512bf16() { return __builtin_cpu_supports("avx512bf16"); }
[[maybe_unused]] static bool has_amx() {
    unsigned a = 7, b, c = 0, d;
    asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) && may_use_tiles();  // amx-bf16, amx-tile, amx-int8
}
#elif defined(__aarch64__) && defined(__linux__)
[[maybe_unused]] static bool has_neon() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP) & HWCAP_ASIMDHP); }
[[maybe_unused]] static bool has_i8mm() { return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) && (getauxval(AT_HWCAP2) & HWCAP2_BF16); }
#endif

struct Level {
    const char *name;
    bool (*offered)();             // by the CPU and the operating system, given all lower levels
    void (*fill)(Kernels &kernels);
};

// In ascending order: the portable one, and those of this architecture that the compiler supports, see CMakeLists.txt.
#define LEVEL(name) {#name, has_##name, fill_##name},
static const Level LEVELS[] = {{"portable", [] { return true; }, fill_portable}, OCTAVO_LEVELS};
static const int NUM_LEVELS = int(sizeof(LEVELS) / sizeof(Level));

static int highest_level() {
    int level = 0;
    while (level + 1 < NUM_LEVELS && LEVELS[level + 1].offered()) level++;
    return level;
}

// --- the selected level ------------------------------------------------------------------------------------------------

static int level_ = -1;
static Kernels kernels_;

const Kernels &kernels() { return kernels_; }

static void set_level(int level) {
    level_ = std::clamp(level, 0, highest_level());
    for (int i = 0; i <= level_; i++) LEVELS[i].fill(kernels_);
}

void choose_level() {
    if (level_ < 0) set_level(NUM_LEVELS - 1);
}

void together(const std::function<void(int)> &body) {
    choose_level();
    make_scratch(pool().threads());
    pool().run(body);
}

}  // namespace octavo

using namespace octavo;

extern "C" {

const char *octavo_level_name(int level) { return level >= 0 && level < NUM_LEVELS ? LEVELS[level].name : nullptr; }
int octavo_cpu_level(void) { return highest_level(); }
void octavo_set_level(int level) {
    Turn turn;
    set_level(level);
}
int octavo_level(void) {
    Turn turn;
    choose_level();
    return level_;
}
void octavo_set_threads(int threads) {
    Turn turn;
    pool().resize(std::max(1, threads));
}
int octavo_threads(void) {
    Turn turn;
    return pool().threads();
}

int octavo_step(const Model *model, const Step *step) {
    return with_buffers([&] { return run_step(*model, *step); });
}
int octavo_matmul(const Matrix *matrix, const float *x, float *y, int64_t rows, int64_t tokens) {
    return with_buffers([&] {
        multiply_all(*matrix, x, y, rows, tokens);
        return 0;
    });
}
int octavo_gate_up(const Matrix *matrix, int activation, const float *x, float *y, int64_t rows, int64_t tokens) {
    return with_buffers([&] {
        gate_up_all(*matrix, activation, x, y, rows, tokens);
        return 0;
    });
}
int octavo_mix(const Mixture *mixture, int activation, const float *x, float *y, int64_t tokens) {
    return with_buffers([&] {
        mix_all(*mixture, activation, x, y, tokens);
        return 0;
    });
}
int octavo_cap_logits(const Model *model, float *logits, int64_t count) {
    return with_buffers([&] {
        cap_all(*model, logits, count);
        return 0;
    });
}

int octavo_add_norm(float *stream, const float *x, const Norm *norm, float *y, int64_t rows, int64_t size) {
    return with_buffers([&] {
        together([&](int thread) {
            Range mine = share(rows, thread, pool().threads());
            for (int64_t row = mine.begin; row < mine.end; row++)
                kernels_.add_norm(stream + row * size, x ? x + row * size : nullptr, *norm, y + row * size, size);
        });
        return 0;
    });
}

int octavo_write(const Model *model, int layer, const Step *step, float *qkv) {
    return with_buffers([&] {
        together([&](int thread) {
            Range mine = share(step->num_tokens, thread, pool().threads());
            for (int64_t token = mine.begin; token < mine.end; token++) kernels_.write(*model, model->layers[layer], *step, qkv, token);
        });
        return 0;
    });
}

int octavo_attend(const Model *model, int layer, const Step *step, const float *qkv, float *out) {
    return with_buffers([&] {
        attend_all(*model, layer, *step, qkv, out);
        return 0;
    });
}

int octavo_absorb(const Model *model, int layer, const float *down, float *qkv, int64_t tokens) {
    return with_buffers([&] {
        absorb_all(model->layers[layer], down, qkv, tokens);
        return 0;
    });
}

int octavo_expand(const Model *model, int layer, const float *latents, float *out, int64_t tokens) {
    return with_buffers([&] {
        expand_all(model->layers[layer], latents, out, tokens);
        return 0;
    });
}

int octavo_delta_net(const Model *model, int layer, const Step *step, const float *qkvz, const float *gates, float *out) {
    return with_buffers([&] {
        recur_all(*model->layers[layer].delta_net, *step, qkvz, gates, out);
        return 0;
    });
}
}
