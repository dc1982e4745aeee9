// The products around latent attention, as the threads of a step compute them.
#pragma once
#include "work.h"

namespace octavo {

void reserve_latent(const Layer &layer, int64_t tokens);  // allocates memory for such a step, before threads start
float *latent_down(const Layer &layer, int64_t tokens);   // where the product `down` goes: [tokens][down.n]
float *latent_results(const Layer &layer, int64_t tokens);  // where the weighted latents go: [tokens][heads * latent]

// Makes rows of q of all heads and the key from the product `down`. They are neither normed nor rotated yet.
void absorb(const Layer &layer, const float *down, float *qkv, int64_t tokens, Worker &me);
// Makes the values of all heads from their weighted latents. out: [tokens][heads * value_dim]
void expand(const Layer &layer, const float *latents, float *out, int64_t tokens, Worker &me);

}  // namespace octavo
