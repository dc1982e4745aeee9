// A pool of threads that run one function together: the caller and its workers, with a barrier between the phases of the work.
//
// A thread spins briefly and then sleeps: phases are microseconds apart on an idle machine, but if another process occupies the core
// of the awaited thread, spinning would only delay it.
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

    // Runs body(thread) on every thread; returns when all have returned.
    void run(const std::function<void(int)> &body);

    // Called inside body: waits until every thread has reached this point.
    void barrier();

private:
    void work(int thread, uint32_t seen);

    std::vector<std::thread> workers_;
    const std::function<void(int)> *body_ = nullptr;
    std::atomic<uint32_t> round_{0};  // incremented for each run; workers wait for it
    std::atomic<bool> stopping_{false};
    // On separate cache lines: an arriving thread must not slow down those that poll the phase, or read the fields above.
    alignas(64) std::atomic<uint32_t> phase_{0};  // incremented for each barrier
    alignas(64) std::atomic<int> arrived_{0};
};

Pool &pool();

// Serialises calls. The level, the threads and the buffers exist once per process, so each function of the C ABI that uses them holds
// a Turn. Ranks communicate while they hold it, since each rank is a process.
class Turn {
    std::lock_guard<std::mutex> held_{one_at_a_time_};
    static inline std::mutex one_at_a_time_;
};

// The part of [0, count) for one thread, in whole multiples of `unit`.
struct Range {
    int64_t begin, end;
};
inline Range share(int64_t count, int thread, int threads, int64_t unit = 1) {
    int64_t units = (count + unit - 1) / unit;
    int64_t begin = units * thread / threads * unit, end = units * (thread + 1) / threads * unit;
    return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace octavo
