// The kernels in use, and how they run on all threads.
#pragma once
#include <functional>
#include <new>
#include <stdexcept>

#include "levels.h"
#include "pool.h"

namespace octavo {

const Kernels &kernels();
void choose_level();                                  // the highest one, if none is set
void together(const std::function<void(int)> &body);  // on every thread of the pool, with AMX tiles configured
void *scratch(int thread);
void make_scratch(int threads);

// Makes a call of the C ABI that needs buffers. Returns the result of `body`, or OCTAVO_NO_MEMORY.
template <class Body> int with_buffers(Body body) {
    Turn turn;
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return OCTAVO_NO_MEMORY;
    } catch (const std::length_error &) {  // of a vector that could never be so long
        return OCTAVO_NO_MEMORY;
    }
}

void unpack_row(const Matrix &matrix, int64_t row, float *to);

int run_step(const Model &model, const Step &step);
void multiply_all(const Matrix &matrix, const float *x, float *y, int64_t rows, int64_t tokens);
void gate_up_all(const Matrix &matrix, int activation, const float *x, float *y, int64_t rows, int64_t tokens);
void mix_all(const Mixture &mixture, int activation, const float *x, float *y, int64_t tokens);
void cap_all(const Model &model, float *logits, int64_t count);
void recur_all(const DeltaNet &net, const Step &step, const float *qkvz, const float *gates, float *out);
void absorb_all(const Layer &layer, const float *down, float *qkv, int64_t tokens);
void expand_all(const Layer &layer, const float *latents, float *out, int64_t tokens);
void attend_all(const Model &model, int layer, const Step &step, const float *qkv, float *out);

}  // namespace octavo
