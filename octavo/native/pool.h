// Threads that run one function together: the caller and its workers, with a barrier between the phases of the work.
//
// Waiting is a short spin, then sleep: phases are microseconds apart when nobody disturbs, and a thread that spins while
// another process holds the core of the one it waits for only delays it.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

class Pool {
public:
    ~Pool() { resize(1); }
    int threads() const { return int(workers_.size()) + 1; }
    void resize(int threads);

    // body(thread) on every thread; returns when all have returned.
    void run(const std::function<void(int)> &body);

    // Inside body: waits until every thread has come here.
    void barrier();

private:
    void work(int thread, uint32_t seen);

    std::vector<std::thread> workers_;
    const std::function<void(int)> *body_ = nullptr;
    std::atomic<uint32_t> round_{0};  // one more for each run: what workers wait for
    std::atomic<bool> stopping_{false};
    // Each on a cache line of its own: who arrives takes nothing away from those that watch the phase, or read what is above.
    alignas(64) std::atomic<uint32_t> phase_{0};  // one more for each barrier passed
    alignas(64) std::atomic<int> arrived_{0};
};

Pool &pool();

// A caller's turn. The level, the threads and the memory between calls are there once in a process, so callers take turns: each function of
// the C ABI that uses them holds one. Ranks meet inside of it, for each of them is a process.
class Turn {
    std::lock_guard<std::mutex> held_{one_at_a_time_};
    static inline std::mutex one_at_a_time_;
};

// The part of [0, count) that is `thread`'s, in whole multiples of `unit`.
struct Range {
    int64_t begin, end;
};
inline Range share(int64_t count, int thread, int threads, int64_t unit = 1) {
    int64_t units = (count + unit - 1) / unit;
    int64_t begin = units * thread / threads * unit, end = units * (thread + 1) / threads * unit;
    return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace octavo
