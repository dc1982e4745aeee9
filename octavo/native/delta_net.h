// Gated DeltaNet, see DeltaNet in octavo.h.
#pragma once
#include "work.h"

namespace octavo {

// Computes both products of all tokens. Returns the first one, which is stored head by head in `qkvz`.
Projected project(const DeltaNet &net, const Rows &rows, float *qkvz, const Rows &gate_rows, float *gates, Worker &me);

// out: [tokens][v_heads * v_dim]
void recur(const DeltaNet &net, const Step &step, const Projected &qkvz, const float *gates, const Target &out, Worker &me);

}  // namespace octavo
