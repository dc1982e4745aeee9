#include "pool.h"

#include "relax.h"

namespace octavo {

static const int SPINS = 400;  // about 20 microseconds

static void wait_while(std::atomic<uint32_t> &value, uint32_t old) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (value.load(std::memory_order_acquire) != old) return;
        relax();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void Pool::resize(int threads) {
    stopping_ = true;
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    for (auto &worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
    for (int thread = 1; thread < threads; thread++) workers_.emplace_back(&Pool::work, this, thread, round_.load());
}

void Pool::work(int thread, uint32_t seen) {
    for (;;) {
        wait_while(round_, seen);
        seen = round_.load(std::memory_order_acquire);
        if (stopping_) return;
        (*body_)(thread);
        barrier();
    }
}

void Pool::run(const std::function<void(int)> &body) {
    if (workers_.empty()) return body(0);
    body_ = &body;
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    body(0);
    barrier();
}

void Pool::barrier() {
    int all = threads();
    if (all == 1) return;
    uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.fetch_add(1, std::memory_order_release);
        phase_.notify_all();
    } else {
        wait_while(phase_, phase);
    }
}

Pool &pool() {
    static Pool the_pool;
    return the_pool;
}

}  // namespace octavo
