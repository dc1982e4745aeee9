// The MLP of an MoE layer, as the threads of a step compute it.
#pragma once
#include "work.h"

namespace octavo {

void reserve_mixture(const Mixture &mixture, int64_t tokens);  // allocates memory for such a step, before threads start
void take_token(const Mixture &mixture, int64_t tokens, int64_t token, const float *row);  // converts a token's row to the formats of the products
void mix(const Mixture &mixture, int activation, int64_t tokens, float *y, Worker &me);    // y: [tokens][hidden]; after take_token() for all rows

}  // namespace octavo
