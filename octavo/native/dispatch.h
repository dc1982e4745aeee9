// The kernels in use, and how they run on all threads.
#pragma once
#include <functional>

#include "levels.h"

namespace octavo {

const Kernels &kernels();
void choose_level();                                  // the highest one, if none is set
void together(const std::function<void(int)> &body);  // on every thread of the pool, with AMX tiles configured
void *scratch(int thread);
void make_scratch(int threads);
void unpack_row(const Matrix &matrix, int64_t row, float *to);

int run_step(const Model &model, const Step &step);
void multiply_all(const Matrix &matrix, const float *x, float *y, int64_t rows, int64_t tokens);
void gate_up_all(const Matrix &matrix, int activation, const float *x, float *y, int64_t rows, int64_t tokens);
void mix_all(const Mixture &mixture, int activation, const float *x, float *y, int64_t tokens);
void cap_all(const Model &model, float *logits, int64_t count);
void attend_all(const Model &model, int layer, const Step &step, const float *qkv, float *out);

}  // namespace octavo
