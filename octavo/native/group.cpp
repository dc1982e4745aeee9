// Ranks that are processes of one host, and the shared memory through which they exchange data.
//
//     line 0               the code that ends all waiting, or 0
//     line 1 + rank        how many exchanges this rank has published
//     from a whole 4 KiB   two slots for each rank
//
// Exchange number n of a rank uses its slot n % 2. A rank never waits before writing: at exchange n + 2 it has seen that
// all others published their n + 1, so all of them have read that slot. Numbers only grow, so nothing is ever reset.
//
// A rank spins briefly, then yields the core (perhaps to the very rank it waits for), then sleeps.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "octavo.h"
#include "relax.h"

namespace octavo {

using Nanoseconds = std::chrono::nanoseconds;
using Milliseconds = std::chrono::milliseconds;
using Microseconds = std::chrono::microseconds;

static const int64_t LINE = 128;                      // bytes that no other rank writes: two cache lines, since cores fetch them in pairs
static const int64_t HEADER_UNIT = 4096;
static const int SPINS = 200;                         // a few microseconds
static const Nanoseconds YIELDING = Microseconds(300);
static const Nanoseconds SHORTEST_SLEEP = Microseconds(50), LONGEST_SLEEP = Milliseconds(2);
static const Nanoseconds LONGEST_LOOK = Milliseconds(100);  // counted between two checks: in a longer gap this rank itself was stopped

using Count = std::atomic<uint64_t>;
using Code = std::atomic<int32_t>;
static_assert(Count::is_always_lock_free && Code::is_always_lock_free, "a lock would be one of this process alone");

static int64_t header_bytes(int64_t size) { return ((1 + size) * LINE + HEADER_UNIT - 1) / HEADER_UNIT * HEADER_UNIT; }

static Code &end_of(const Group &group) { return *static_cast<Code *>(group.memory); }

static Count &shown(const Group &group, int64_t rank) {
    void *line = static_cast<char *>(group.memory) + (1 + rank) * LINE;
    return *static_cast<Count *>(line);
}

static char *slot(const Group &group, int64_t rank, uint64_t number) {
    return static_cast<char *>(group.memory) + header_bytes(group.size) + (2 * rank + int64_t(number % 2)) * group.slot_bytes;
}

// Ends all waiting with this code. If another rank was first, its code is kept and returned.
static int end_with(const Group &group, int32_t code) {
    int32_t none = 0;
    return end_of(group).compare_exchange_strong(none, code, std::memory_order_acq_rel) ? code : none;
}

static void give_way(Nanoseconds waited) {
    if (waited < YIELDING) std::this_thread::yield();
    else std::this_thread::sleep_for(std::clamp(waited / 16, SHORTEST_SLEEP, LONGEST_SLEEP));
}

// Returns 0 when the rank has published its exchange of this number, or the code that ends all waiting.
static int wait_for(const Group &group, int64_t rank, uint64_t number) {
    auto came = [&] { return shown(group, rank).load(std::memory_order_acquire) >= number; };
    for (int spin = 0; spin < SPINS; spin++) {
        if (came()) return 0;
        relax();
    }
    Nanoseconds waited{0};
    for (auto last = std::chrono::steady_clock::now(); !came();) {
        if (int code = end_of(group).load(std::memory_order_acquire)) return code;
        if (waited >= Milliseconds(group.timeout_ms)) return end_with(group, int32_t(1 + rank));
        give_way(waited);
        auto now = std::chrono::steady_clock::now();
        waited += std::min<Nanoseconds>(now - last, LONGEST_LOOK);
        last = now;
    }
    return 0;
}

// Publishes bytes, at most a slot of them, to all ranks, and calls take(rank, bytes) with those of every rank, in order.
template <class Take> static int exchange(const Group &group, const void *mine, int64_t bytes, Take take) {
    if (int code = end_of(group).load(std::memory_order_acquire)) return code;
    Count &own = shown(group, group.rank);
    const uint64_t number = own.load(std::memory_order_relaxed) + 1;
    memcpy(slot(group, group.rank, number), mine, size_t(bytes));
    own.store(number, std::memory_order_release);
    for (int64_t rank = 0; rank < group.size; rank++) {
        if (int code = wait_for(group, rank, number)) return code;
        take(rank, slot(group, rank, number));
    }
    return 0;
}

}  // namespace octavo

using namespace octavo;

extern "C" {

int64_t octavo_group_bytes(int size, int64_t slot_bytes) { return header_bytes(size) + 2 * size * slot_bytes; }

void octavo_abort(const Group *group) { end_with(*group, -int32_t(1 + group->rank)); }

int octavo_reduce(const Group *group, float *data, int64_t count) {
    const int64_t most = group->slot_bytes / int64_t(sizeof(float));
    for (int64_t begin = 0; begin < count; begin += most) {
        const int64_t some = std::min(most, count - begin);
        float *sum = data + begin;
        int code = exchange(*group, sum, some * int64_t(sizeof(float)), [&](int64_t rank, const char *bytes) {
            const float *theirs = reinterpret_cast<const float *>(bytes);
            if (rank == 0) memcpy(sum, theirs, size_t(some) * sizeof(float));
            else
                for (int64_t i = 0; i < some; i++) sum[i] += theirs[i];
        });
        if (code) return code;
    }
    return 0;
}

int octavo_gather(const Group *group, const void *mine, void *all, int64_t bytes) {
    for (int64_t begin = 0; begin < bytes; begin += group->slot_bytes) {
        const int64_t some = std::min(group->slot_bytes, bytes - begin);
        int code = exchange(*group, static_cast<const char *>(mine) + begin, some, [&](int64_t rank, const char *theirs) {
            memcpy(static_cast<char *>(all) + rank * bytes + begin, theirs, size_t(some));
        });
        if (code) return code;
    }
    return 0;
}
}
