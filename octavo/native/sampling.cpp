// Sampling over rows: each thread takes the next row when it is done.
#include <atomic>

#include "work.h"

namespace octavo {

static Buffer memory_;  // of all threads

template <class Work> static void each_row(int64_t rows, int64_t vocab, Work work) {
    const int64_t size = row_words(vocab);
    uint32_t *memory = memory_.get<uint32_t>(size * pool().threads());
    choose_level();
    if (rows == 1) return work(0, memory);  // not worth waking other threads
    std::atomic<int64_t> next{0};
    together([&](int thread) {
        for (int64_t row = next++; row < rows; row = next++) work(row, memory + size * thread);
    });
}

}  // namespace octavo

using namespace octavo;

extern "C" {

int octavo_draw(const Draws *draws) {
    return with_buffers([&] {
        each_row(draws->rows, draws->vocab, [&](int64_t row, uint32_t *memory) { kernels().draw(*draws, row, memory); });
        return 0;
    });
}

int octavo_rank(const Ranking *ranking) {
    return with_buffers([&] {
        each_row(ranking->rows, ranking->vocab, [&](int64_t row, uint32_t *memory) { kernels().rank(*ranking, row, memory); });
        return 0;
    });
}

void octavo_uniform(const int64_t *noise, int64_t position, float *numbers, int64_t count) {
    Turn turn;
    choose_level();
    kernels().uniform(noise, position, numbers, count);
}
}
