// Divides Gated DeltaNet into the v heads of each row. A head computes everything between the products in and out by itself, so threads
// wait for each other only at the end.
#include "delta_net.h"

namespace octavo {

// The products are one phase, so that threads wait for each other only once.
Projected project(const DeltaNet &net, const Rows &rows, float *qkvz, const Rows &gate_rows, float *gates, Worker &me) {
    const int64_t first = panels(net.qkvz.n), keys = 2 * net.k_heads * net.k_dim, tokens = rows.rows;
    me.deal(first + panels(net.gates.n), PANELS, [&](int64_t panel, int64_t end) {
        for (int64_t until; panel < std::min(first, end); panel = until) {
            const int64_t column = panel * OCTAVO_PANEL, size = column < keys ? net.k_dim : net.v_dim;
            const int64_t begin = column - (column < keys ? column : column - keys) % size;  // the first column of the head
            until = std::min(end, (begin + size) / OCTAVO_PANEL);
            kernels().product(net.qkvz, rows, panel, until, qkvz + begin * (tokens - 1), size, scratch(me.thread));
        }
        if (end > panel) kernels().product(net.gates, gate_rows, panel - first, end - first, gates, net.gates.n, scratch(me.thread));
    });
    return {qkvz, tokens};
}

// Pieces consist of consecutive tasks, so the rows of a head follow each other: a long row is not in one piece with all of its heads.
void recur(const DeltaNet &net, const Step &step, const Projected &qkvz, const float *gates, const Target &out, Worker &me) {
    me.deal(int64_t(net.v_heads) * step.num_rows, 1, [&](int64_t task, int64_t end) {
        for (; task < end; task++) kernels().delta_net(net, step, qkvz, gates, out, task % step.num_rows, task / step.num_rows, scratch(me.thread));
    });
}

void recur_all(const DeltaNet &net, const Step &step, const float *qkvz, const float *gates, float *out) {
    const Target target{out, nullptr, int64_t(net.v_heads) * net.v_dim};
    work([&](Worker &me) { recur(net, step, {qkvz, 0}, gates, target, me); });
}

}  // namespace octavo
