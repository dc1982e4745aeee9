// How threads share the work of a step: buffers, dynamic division into pieces, and products made of such pieces.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>

#include "dispatch.h"
#include "pool.h"

namespace octavo {

// Memory that grows and is reused from step to step. It may grow only on the thread of the caller, where std::bad_alloc is caught.
class Buffer {
public:
    template <class T> T *get(int64_t count) {
        size_t bytes = (size_t(count) * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > bytes_) {
            memory_.reset(), bytes_ = 0;
            memory_.reset(static_cast<char *>(std::aligned_alloc(4096, bytes)));
            if (!memory_) throw std::bad_alloc();
            bytes_ = bytes;
        }
        return reinterpret_cast<T *>(memory_.get());
    }

    void match(const Buffer &other) { get<char>(int64_t(other.bytes_)); }

private:
    struct Free {
        void operator()(char *memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory_;
    size_t bytes_ = 0;
};

// Rows prepared for a product. On some levels their format depends on the number of tokens in their step: the logits of a prompt's last
// token are computed with the same precision as the prompt.
struct RowBuffer {
    Buffer values, scale, sum;

    Rows get(const Matrix &matrix, int64_t count, int64_t tokens) {
        Rows rows{};
        rows.form = kernels().form(matrix, tokens);
        rows.rows = count;
        rows.stride = padded(matrix);
        void *memory = values.get<float>((count + 31) / 32 * 32 * rows.stride);  // tiles read whole blocks of rows
        rows.values = static_cast<float *>(memory);
        rows.halves = static_cast<uint16_t *>(memory);
        rows.codes = static_cast<int8_t *>(memory);
        const int64_t spans = count * (rows.stride / span_of(matrix));
        if (rows.form == Form::INT8 || rows.form == Form::HALF) rows.scale = scale.get<float>(spans);
        if (rows.form == Form::INT8) rows.sum = sum.get<float>(spans);
        return rows;
    }

    void match(const RowBuffer &other) { values.match(other.values), scale.match(other.scale), sum.match(other.sum); }
};

// The progress of a thread through a step. All threads go through the same phases; a phase ends when its work is done.
struct Worker {
    int thread;
    int64_t phase = 0;

    // Calls work(begin, end) for pieces of [0, count), in multiples of `unit`: large ones first, so that all threads finish together.
    template <class Work> void deal(int64_t count, int64_t unit, Work work) {
        std::atomic<int64_t> &next = next_[phase % 3];
        if (thread == 0) next_[(phase + 1) % 3].store(0, std::memory_order_relaxed);  // unused since the phase before last
        for (int64_t begin = next.load(std::memory_order_relaxed); begin < count;) {
            int64_t size = std::max<int64_t>(1, (count - begin) / (2 * pool().threads() * unit)) * unit, end = std::min(count, begin + size);
            if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            work(begin, end);
            begin = next.load(std::memory_order_relaxed);
        }
        phase++;
        pool().barrier();
    }

    static void start() {
        for (auto &next : next_) next.store(0, std::memory_order_relaxed);
    }

private:
    alignas(64) static inline std::atomic<int64_t> next_[3];
};

void work(const std::function<void(Worker &)> &body);  // on every thread

// Where results go that are the input of the next product: directly into its rows, if they only need rounding to bfloat16.
inline Target target_of(const Matrix &matrix, const Rows &rows, float *values) {
    bool straight = rows.form == Form::BF16 && !matrix.order && rows.stride == matrix.k;
    return {values, straight ? rows.halves : nullptr, matrix.k};
}

const int64_t TOKENS = 8;  // minimum size of a piece
const int64_t PANELS = 2;

// Prepares rows that are still floats.
inline void prepare(const Matrix &matrix, const Target &made, const Rows &rows, Worker &me) {
    if (made.halves) return;
    me.deal(rows.rows, TOKENS, [&](int64_t row, int64_t end) {
        for (; row < end; row++) kernels().prepare(matrix, made.values + row * matrix.k, rows, row);
    });
}

inline void multiply(const Matrix &matrix, const Rows &rows, float *y, int64_t stride, Worker &me) {
    me.deal(panels(matrix.n), PANELS, [&](int64_t panel, int64_t end) {
        kernels().product(matrix, rows, panel, end, y, stride, scratch(me.thread));
    });
}

inline void gate_up(const Matrix &matrix, int activation, const Rows &rows, const Target &y, Worker &me) {
    me.deal(panels(activated(matrix, activation)), PANELS / 2, [&](int64_t panel, int64_t end) {
        kernels().gate_up(matrix, activation, rows, panel, end, y, scratch(me.thread));
    });
}

}  // namespace octavo
