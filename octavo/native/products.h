// Products of rows with panels, for every level. A Math is one way to multiply some rows by one panel:
//
//     MOST                           rows of a block: their sums stay in registers
//     panel(index, memory)           the panel in the format of block(): in place, or unpacked into memory
//     block<R>(row, weights, sums)   R rows from `row` on times the panel
//
// Levels differ in the Math they select for a matrix and its rows; all share the loops around it, which add biases, apply gates, and
// store. All of it is in an unnamed namespace: code compiled for one level must never be used by another.
#pragma once
#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "levels.h"

namespace octavo {
namespace {

const int P = OCTAVO_PANEL;
const int64_t NEAR_BYTES = 1 << 19;  // rows of x that stay in the L2 cache while panels are read

inline Lanes bias_of(const Matrix &matrix, int64_t panel) {
    return matrix.bias ? load_some(matrix.bias + panel * P, matrix.n - panel * P) : zeros();
}

// Stores 16 results of a row, from column `begin` on; only `left` of them are valid.
inline void put(const Lanes &values, const Target &target, int64_t row, int64_t begin, int64_t left) {
    int64_t place = row * target.stride + begin;
    if (target.halves) store_bf16(values, target.halves + place, left);
    else store_some(values, target.values + place, left);
}

// Up to R rows.
template <int R, class Math, class Weights>
inline void block_of(const Math &math, int64_t row, int64_t count, Weights weights, Lanes *sums) {
    if constexpr (R > 1)
        if (count < R) return block_of<R - 1>(math, row, count, weights, sums);
    math.template block<R>(row, weights, sums);
}

// Calls run(from, to) for ranges of rows that fit into the L2 cache.
template <class Math, class Run> void by_near_rows(const Rows &rows, Run run) {
    const int64_t bytes = rows.stride * (rows.form == Form::FLOAT ? 4 : rows.form == Form::INT8 ? 1 : 2);
    const int64_t near = std::max<int64_t>(1, NEAR_BYTES / bytes / Math::MOST) * Math::MOST;
    for (int64_t row = 0; row < rows.rows; row += near) run(row, std::min(rows.rows, row + near));
}

// Calls store(values, row, panel) with the results of every row for panels [begin, end).
template <class Math, class Store>
void product_with(const Math &math, const Matrix &matrix, const Rows &rows, int64_t begin, int64_t end, void *scratch, Store store) {
    by_near_rows<Math>(rows, [&](int64_t from, int64_t to) {
        for (int64_t panel = begin; panel < end; panel++) {
            auto weights = math.panel(panel, scratch);
            const Lanes bias = bias_of(matrix, panel);
            Lanes sums[Math::MOST];
            for (int64_t row = from; row < to; row += Math::MOST) {
                int64_t count = std::min<int64_t>(Math::MOST, to - row);
                block_of<Math::MOST>(math, row, count, weights, sums);
                for (int64_t r = 0; r < count; r++) store(sums[r] + bias, row + r, panel);
            }
        }
    });
}

// y[row][n] = the gated value for pairs of panels: the first of each pair is gate, the second up.
template <class Math>
void gate_up_with(const Math &math, const Matrix &matrix, int activation, const Rows &rows, int64_t begin, int64_t end, const Target &y, void *scratch) {
    by_near_rows<Math>(rows, [&](int64_t from, int64_t to) {
        for (int64_t pair = begin; pair < end; pair++) {
            auto gate_weights = math.panel(2 * pair, scratch), up_weights = math.panel(2 * pair + 1, (float *)scratch + rows.stride * P);
            const Lanes gate_bias = bias_of(matrix, 2 * pair), up_bias = bias_of(matrix, 2 * pair + 1);
            Lanes gate[Math::MOST], up[Math::MOST];
            for (int64_t row = from; row < to; row += Math::MOST) {
                int64_t count = std::min<int64_t>(Math::MOST, to - row);
                block_of<Math::MOST>(math, row, count, gate_weights, gate);
                block_of<Math::MOST>(math, row, count, up_weights, up);
                for (int64_t r = 0; r < count; r++)
                    put(gated(activation, gate[r] + gate_bias, up[r] + up_bias), y, row + r, pair * P, matrix.n / 2 - pair * P);
            }
        }
    });
}

// --- floats ------------------------------------------------------------------------------------------------------------

// Weights of k and k + 1, k even, of a panel.
struct FloatPanel {
    const float *w;
    INLINE void load_two(int64_t k, Lanes *two) const { two[0] = load(w + k * P), two[1] = load(w + (k + 1) * P); }
};
struct F16Panel {
    const uint16_t *w;
    INLINE void load_two(int64_t k, Lanes *two) const { two[0] = load_f16(w + k * P), two[1] = load_f16(w + (k + 1) * P); }
};
struct BF16Panel {
    const uint16_t *w;
    INLINE void load_two(int64_t k, Lanes *two) const {
        Words pairs = load_words(w + k * P);
        two[0] = first_bf16(pairs), two[1] = second_bf16(pairs);
    }
};

// As many rows as leave registers for a panel's weights and a number of x.
const int FLOAT_MOST = WIDTH == 16 ? 12 : WIDTH == 8 ? 6 : 4;

// One sum per row, one k after the other: the bits of a row do not depend on the other rows. In small batches, the latency of
// sums matters less than that of memory.
template <int R, class Panel> void block_float(const Panel &panel, const Rows &rows, int64_t row, Lanes *sums) {
    const float *x = rows.values + row * rows.stride;
    Lanes acc[R];
    for (int r = 0; r < R; r++) acc[r] = zeros();
    for (int64_t k = 0; k < rows.stride; k += 4) {
        Lanes weights[4];
        panel.load_two(k, weights);
        panel.load_two(k + 2, weights + 2);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++)
            for (int r = 0; r < R; r++) acc[r] = multiply_add(weights[u], broadcast(x[r * rows.stride + k + u]), acc[r]);
    }
    for (int r = 0; r < R; r++) sums[r] = acc[r];
}

template <class Panel> struct FloatMath {  // weights are read in place
    static const int MOST = FLOAT_MOST;
    const Matrix &matrix;
    const Rows &rows;

    Panel panel(int64_t index, void *) const {
        auto *data = (decltype(Panel::w))matrix.data;
        return {data + index * rows.stride * P};
    }
    template <int R> void block(int64_t row, Panel weights, Lanes *sums) const {
        block_float<R>(weights, rows, row, sums);
        for (int r = 0; r < R; r++) sums[r] = sums[r] * matrix.factor;
    }
};

// Calls run(digits) with the format of a matrix's codes as a compile-time constant.
template <class Run> inline void by_digits(const Matrix &matrix, Run run) {
    if (matrix.kind == OCTAVO_Q8) run(std::integral_constant<Digits, Digits::BYTES>());
    else if (matrix.table) run(std::integral_constant<Digits, Digits::LOOKED_UP>());
    else run(std::integral_constant<Digits, Digits::NIBBLES>());
}

// 16 rows of 4 bytes each, in one register. 4-bit codes give two registers: the low and the high halves of all bytes.
// Calls run(words, shift of the first number, mask of each).
template <Digits D, class Run> INLINE void each_quad(const Words &words, const uint8_t *table, Run run) {
    if constexpr (D == Digits::BYTES) run(words, 0, 255);
    else if constexpr (D == Digits::NIBBLES) run(words, 0, 15), run(words, 4, 15);
    else run(looked_up(low_digits(words), table), 0, 255), run(looked_up(high_digits(words), table), 0, 255);
}

// Weights are widened to floats first, if there are enough rows. Sums have the same bits as in place.
template <class Panel> struct WidenedMath : FloatMath<FloatPanel> {
    FloatPanel panel(int64_t index, void *memory) const {
        const Panel from{(decltype(Panel::w))matrix.data + index * rows.stride * P};
        float *to = (float *)memory;
        for (int64_t k = 0; k < rows.stride; k += 2) {
            Lanes two[2];
            from.load_two(k, two);
            store(two[0], to + k * P);
            store(two[1], to + (k + 1) * P);
        }
        return {to};
    }
};

template <class Panel, class Run> void choose_halves(const Matrix &matrix, const Rows &rows, Run run) {
    if (rows.rows > FLOAT_MOST) run(WidenedMath<Panel>{{matrix, rows}});
    else run(FloatMath<Panel>{matrix, rows});
}

template <class Run> void choose_float(const Matrix &matrix, const Rows &rows, Run run) {
    if (matrix.kind == OCTAVO_F32) run(FloatMath<FloatPanel>{matrix, rows});
    else if (matrix.kind == OCTAVO_F16) choose_halves<F16Panel>(matrix, rows, run);
    else choose_halves<BF16Panel>(matrix, rows, run);
}

// --- 8-bit codes -------------------------------------------------------------------------------------------------------

// Accumulates the rows of a block for one panel, from totals of code times code over each span. CENTRED: the codes of weights
// were shifted by -128 to signed bytes.
template <int R, bool CENTRED = false> struct CodeSums {
    const Matrix &matrix;
    const Rows &rows;
    const int64_t row, panel, span = span_of(matrix), spans = rows.stride / span, groups = rows.stride / matrix.group;
    const int span_bits = __builtin_ctzll(uint64_t(span)), group_bits = __builtin_ctzll(uint64_t(matrix.group));  // powers of two
    Lanes acc[R];

    CodeSums(const Matrix &matrix, const Rows &rows, int64_t row, int64_t panel) : matrix(matrix), rows(rows), row(row), panel(panel) {
        for (int r = 0; r < R; r++) acc[r] = zeros();
    }
    // total(r): of row r, for the span that starts at k
    template <class Total> INLINE void add_span(int64_t k, Total total) {
        const int64_t place = (panel * groups + (k >> group_bits)) * P;
        add_span(k, load_f16(matrix.scale + place), load_f16(matrix.offset + place), total);
    }
    template <class Total> INLINE void add_span(int64_t k, const Lanes &scales, Lanes offsets, Total total) {
        const int64_t index = row * spans + (k >> span_bits);
        if (CENTRED) offsets = multiply_add(scales, broadcast(128.0f), offsets);
        for (int r = 0; r < R; r++) {
            acc[r] = multiply_add(total(r), scales * rows.scale[index + r * spans], acc[r]);
            acc[r] = multiply_add(offsets, broadcast(rows.sum[index + r * spans]), acc[r]);
        }
    }
    void finish(Lanes *sums) const {
        for (int r = 0; r < R; r++) sums[r] = acc[r] * matrix.factor;
    }
};

// --- rows of x ---------------------------------------------------------------------------------------------------------

// The largest of |values|, compared as bits: infinity and NaN, which codes cannot represent, are larger than any number.
inline float largest_of(const float *values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, float_to_bits(values[i]) & 0x7fffffff);
    return bits_to_float(largest);
}

// Quantises a span of x to 8-bit codes. Infinity and NaN have no codes: the scale holds them, which makes every product NaN.
inline void quantize_span(const float *values, int64_t count, int8_t *codes, float &scale, float &sum) {
    const float largest = largest_of(values, count), inverse = largest > 0 ? 127 / largest : 0.0f;
    const bool finite = float_to_bits(largest) < 0x7f800000;
    scale = largest / 127;
    int total = 0;
    for (int64_t i = 0; i < count; i++) {
        int code = finite ? int(nearbyintf(values[i] * inverse)) : 0;
        codes[i] = int8_t(code);
        total += code;
    }
    sum = scale * float(total);
}

// The power of two that scales the largest of |values| to at most 1; infinite or NaN if that is.
inline float power_above(float largest) {
    const uint32_t bits = float_to_bits(largest);
    if (bits >= 0x7f800000) return largest;
    return bits_to_float(std::max<uint32_t>((bits + 0x7fffff) & 0xff800000, 0x01000000));  // at least 2^-125: its inverse is finite
}

inline void halve_span(const float *values, int64_t count, uint16_t *halves, float &scale) {
    scale = power_above(largest_of(values, count));
    const float inverse = 1.0f / scale;
    for (int64_t i = 0; i < count; i += LANE_COUNT) store_f16(load(values + i) * inverse, halves + i);
}

// Columns [begin, begin + count) of x in the order of the weights: in place or, reordered and padded, in `local`.
inline const float *columns(const Matrix &matrix, const float *x, int64_t begin, int64_t count, float *local) {
    if (!matrix.order && begin + count <= matrix.k) return x + begin;
    for (int64_t i = 0; i < count; i++) local[i] = begin + i >= matrix.k ? 0.0f : x[matrix.order ? matrix.order[begin + i] : begin + i];
    return local;
}

// Converts a row of x to the format of `rows`.
void prepare_row(const Matrix &matrix, const float *x, const Rows &rows, int64_t row) {
    const int64_t span = span_of(matrix), spans = rows.stride / span;
    for (int64_t i = 0; i < spans; i++) {
        float local[SPAN];
        const float *values = columns(matrix, x, i * span, span, local);
        const int64_t place = row * rows.stride + i * span, index = row * spans + i;
        if (rows.form == Form::FLOAT) memcpy(rows.values + place, values, size_t(span) * sizeof(float));
        else if (rows.form == Form::INT8) quantize_span(values, span, rows.codes + place, rows.scale[index], rows.sum[index]);
        else if (rows.form == Form::HALF) halve_span(values, span, rows.halves + place, rows.scale[index]);
        else
            for (int64_t k = 0; k < span; k += P) store_bf16(load(values + k), rows.halves + place + k, P);
    }
}

// --- the kernels of a level ----------------------------------------------------------------------------------------------

// Codes by codes, all other weights by floats, however many rows there are. CodesMath: how the level multiplies codes.
template <template <Digits> class CodesMath> struct FloatChoice {
    static Form form(const Matrix &matrix, int64_t) { return has_codes(matrix) ? Form::INT8 : Form::FLOAT; }

    template <class Run> static void choose(const Matrix &matrix, const Rows &rows, Run run) {
        if (rows.form == Form::FLOAT) choose_float(matrix, rows, run);
        else by_digits(matrix, [&](auto digits) { run(CodesMath<digits>{matrix, rows}); });
    }
};

template <class Choice>
void product_by(const Matrix &matrix, const Rows &rows, int64_t panel, int64_t end, float *y, int64_t stride, void *scratch) {
    // It captures values, here and below: references would be read again for each row.
    auto store = [y, stride, n = matrix.n](const Lanes &values, int64_t row, int64_t at) {
        store_some(values, y + row * stride + at * P, n - at * P);
    };
    Choice::choose(matrix, rows, [&](const auto &math) { product_with(math, matrix, rows, panel, end, scratch, store); });
}

template <class Choice>
void gate_up_by(const Matrix &matrix, int activation, const Rows &rows, int64_t panel, int64_t end, const Target &y, void *scratch) {
    auto store = [y, n = matrix.n](const Lanes &values, int64_t row, int64_t at) { put(gelu(values), y, row, at * P, n - at * P); };
    Choice::choose(matrix, rows, [&](const auto &math) {
        if (activation == OCTAVO_GELU) product_with(math, matrix, rows, panel, end, scratch, store);
        else gate_up_with(math, matrix, activation, rows, panel, end, y, scratch);
    });
}

template <class Choice> void fill_products(Kernels &kernels) {
    kernels.form = Choice::form;
    kernels.prepare = prepare_row;
    kernels.product = product_by<Choice>;
    kernels.gate_up = gate_up_by<Choice>;
}

}  // namespace
}  // namespace octavo
