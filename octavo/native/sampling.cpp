// Sampling over rows: each thread takes the next row when it is done.
#include <atomic>
#include <vector>

#include "dispatch.h"
#include "pool.h"

namespace octavo {

static std::vector<uint32_t> memory_;  // per thread, reused between calls

template <class Work> static void each_row(int64_t rows, int64_t vocab, Work work) {
    size_t size = size_t(row_words(vocab)), wanted = size * size_t(pool().threads());
    if (memory_.size() < wanted) memory_ = std::vector<uint32_t>(wanted);
    choose_level();
    if (rows == 1) return work(0, memory_.data());  // not worth waking other threads
    std::atomic<int64_t> next{0};
    together([&](int thread) {
        for (int64_t row = next++; row < rows; row = next++) work(row, memory_.data() + size * size_t(thread));
    });
}

}  // namespace octavo

using namespace octavo;

extern "C" {

void octavo_draw(const Draws *draws) {
    Turn turn;
    each_row(draws->rows, draws->vocab, [&](int64_t row, uint32_t *memory) { kernels().draw(*draws, row, memory); });
}

void octavo_rank(const Ranking *ranking) {
    Turn turn;
    each_row(ranking->rows, ranking->vocab, [&](int64_t row, uint32_t *memory) { kernels().rank(*ranking, row, memory); });
}

void octavo_uniform(const int64_t *noise, int64_t position, float *numbers, int64_t count) {
    Turn turn;
    choose_level();
    kernels().uniform(noise, position, numbers, count);
}
}
