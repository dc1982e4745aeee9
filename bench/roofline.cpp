// What this machine can do at most, measured: reading memory with all threads, and multiplying out of registers alone.
// `roofline THREADS ROUNDS` prints a line for each sample: its name and gigabytes or tera-operations a second, or `absent`.
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

namespace {

using Work = std::function<void(int thread)>;

// The longest a thread takes is what counts: a step of the engine ends when its last thread does.
double seconds(int threads, const Work& work) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
    work(0);
    for (auto& other : others) other.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

volatile std::int64_t sink;  // what was computed is used, so that it is computed

void read(const char* name, std::size_t bytes, int threads, int rounds) {
    const std::size_t count = bytes / sizeof(std::int64_t) / threads;
    std::vector<std::vector<std::int64_t>> parts(threads);
    seconds(threads, [&](int thread) { parts[thread].assign(count, thread); });
    const int repeats = static_cast<int>(std::max<std::size_t>(1, (std::size_t{2} << 30) / bytes));  // 2 GiB a sample
    for (int round = -1; round < rounds; ++round) {
        const double took = seconds(threads, [&](int thread) {
            std::int64_t sum = 0;
            for (int repeat = 0; repeat < repeats; ++repeat) {
                const std::int64_t* values = parts[thread].data();
                asm volatile("" : "+r"(values) : : "memory");  // a new reading each time
                for (std::size_t i = 0; i < count; ++i) sum += values[i];
            }
            sink = sum;
        });
        if (round >= 0) std::printf("%s %.3f\n", name, 8e-9 * count * threads * repeats / took);  // the first one warms up
    }
}

// `work` does `operations` in each thread.
void compute(const char* name, double operations, int threads, int rounds, const Work& work) {
    for (int round = -1; round < rounds; ++round) {
        const double took = seconds(threads, work);
        if (round >= 0) std::printf("%s %.3f\n", name, 1e-12 * operations * threads / took);
    }
}

constexpr int TIMES = 8'000'000;

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
bool allow_amx() {
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM; Linux hands out the tiles' state only when asked
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

void full_tiles() {
    struct {
        std::uint8_t palette = 1, start = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {};
        std::uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64, config.rows[tile] = 16;
    asm volatile("" : : "r"(&config) : "memory");  // gcc believes that eight bytes of it are read, and would leave the rest unwritten
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
}

void amx(int threads, int rounds) {
    constexpr double rows_and_columns = 16 * 16, times = TIMES / 16;
    // Four accumulators, two tiles of each operand: what a kernel that keeps its result in registers can have.
    compute("amx_bf16", 2 * rows_and_columns * 32 * 4 * times, threads, rounds, [](int) {
        full_tiles();
        for (int i = 0; i < times; ++i) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_release();
    });
    compute("amx_int8", 2 * rows_and_columns * 64 * 4 * times, threads, rounds, [](int) {
        full_tiles();
        for (int i = 0; i < times; ++i) {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        _tile_release();
    });
}
#else
bool allow_amx() { return false; }
void amx(int, int) {}
#endif

constexpr int CHAINS = 12;  // enough sums in flight to hide the latency of one

#ifdef __AVX512BF16__
void avx512_bf16(int threads, int rounds) {
    compute("avx512_bf16", 2.0 * 32 * CHAINS * TIMES, threads, rounds, [](int) {
        __m512 sums[CHAINS] = {};
        const __m512i a = _mm512_set1_epi16(0x3f80), b = a;  // ones
        for (int i = 0; i < TIMES; ++i) {
#pragma GCC unroll 12
            for (auto& sum : sums) {
                sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
                asm volatile("" : "+v"(sum));  // each is a sum of its own
            }
        }
        for (auto& sum : sums) sink = static_cast<std::int64_t>(_mm512_reduce_add_ps(sum));
    });
}
#else
void avx512_bf16(int, int) { std::puts("avx512_bf16 absent"); }
#endif

#ifdef __AVX512VNNI__
void avx512_vnni(int threads, int rounds) {
    compute("avx512_vnni", 2.0 * 64 * CHAINS * TIMES, threads, rounds, [](int) {
        __m512i sums[CHAINS] = {};
        const __m512i a = _mm512_set1_epi8(1), b = a;
        for (int i = 0; i < TIMES; ++i) {
#pragma GCC unroll 12
            for (auto& sum : sums) {
                sum = _mm512_dpbusd_epi32(sum, a, b);
                asm volatile("" : "+v"(sum));
            }
        }
        for (auto& sum : sums) sink = _mm512_reduce_add_epi32(sum);
    });
}
#else
void avx512_vnni(int, int) { std::puts("avx512_vnni absent"); }
#endif

}  // namespace

int main(int, char** arguments) {
    const int threads = std::atoi(arguments[1]), rounds = std::atoi(arguments[2]);
    const bool tiles = allow_amx();  // before threads start: they inherit it
    read("read_96_mb", 96'000'000, threads, rounds);
    read("read_1_gib", std::size_t{1} << 30, threads, rounds);
    if (tiles) amx(threads, rounds);
    else std::puts("amx_bf16 absent\namx_int8 absent");
    avx512_bf16(threads, rounds);
    avx512_vnni(threads, rounds);
}
