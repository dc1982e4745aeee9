// The MLP of a layer with experts, as the threads of a step compute it.
#pragma once
#include "work.h"

namespace octavo {

void reserve_mixture(const Mixture &mixture, int64_t tokens);  // memory for such a step; before threads start
void take_token(const Mixture &mixture, int64_t tokens, int64_t token, const float *row);  // makes a token's row ready for all that reads it
void mix(const Mixture &mixture, int activation, int64_t tokens, float *y, Worker &me);    // y: [tokens][hidden]; after all rows were taken

}  // namespace octavo
