// AMX: a tile is 16 rows of 64 bytes, and one instruction multiplies 16 x 32 by 32 x 16 numbers of bfloat16, or 16 x 64 by 64 x 16 codes.
//
// bfloat16 weights are multiplied by tiles however few rows there are: the bits of a row do not depend on the other rows of its tile.
// Codes are multiplied by vectors in small batches, which gives the same bits as tiles.
#include "codes_amx.h"

namespace octavo {
namespace {

// The number of rows of codes from which on tiles are faster than vectors.
inline int64_t least_rows(const Matrix &matrix) { return matrix.kind == OCTAVO_Q8 ? 9 : 25; }

//     rows of x    A: 16 rows x 32 k              C0 += A0 B0   C1 += A0 B1      four tiles of results for every four that are
//     panel        B: 16 pairs of k x 16 n        C2 += A1 B0   C3 += A1 B1      loaded: 32 rows times two panels
struct BF16Tiles {
    static constexpr int64_t ROWS = BLOCK;  // in a block
    struct Panels {
        const uint16_t *first, *second;
    };
    const Matrix &matrix;
    const Rows &rows;

    void configure() const { load_config(std::min(TILE, rows.rows), 64); }
    int64_t near_rows() const { return NEAR_BYTES / (2 * rows.stride); }
    Panels panels(int64_t first, int64_t second, void *) const { return {panel(first), panel(second)}; }

    // Up to 32 rows of x times two panels. sums: [2 panels][32][16]. meanwhile(n) is called again and again: it does n of 32 parts of
    // the work that needs no tiles.
    template <class Meanwhile> void multiply(const Panels &two, int64_t row, int64_t count, float *sums, Meanwhile meanwhile) const {
        (count > TILE ? multiply_tiles<true, Meanwhile> : multiply_tiles<false, Meanwhile>)(
            rows.halves + row * rows.stride, rows.stride, two.first, two.second, sums, meanwhile);
    }

private:
    const uint16_t *panel(int64_t index) const { return (const uint16_t *)matrix.data + index * rows.stride * P; }

    template <bool BOTH, class Meanwhile>
    static void multiply_tiles(const uint16_t *x, int64_t stride, const uint16_t *first, const uint16_t *second, float *sums, Meanwhile meanwhile) {
        const int64_t at_once = (BLOCK * 32 + stride - 1) / stride;
        _tile_zero(0);
        _tile_zero(1);
        if (BOTH) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < stride; k += 32) {
            _tile_loadd(4, x + k, stride * 2);
            _tile_loadd(6, first + k * P, 64);
            _tile_loadd(7, second + k * P, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (BOTH) {
                _tile_loadd(5, x + TILE * stride + k, stride * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            meanwhile(at_once);
        }
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + BLOCK * P, 64);
        if (!BOTH) return;
        _tile_stored(2, sums + TILE * P, 64);
        _tile_stored(3, sums + BLOCK * P + TILE * P, 64);
    }
};

struct Finished {  // sums of a block of rows and two panels that are not stored yet
    int64_t row = 0, count = 0, panel = 0, taken = 0;
    const float *sums = nullptr;
};

// All rows times panels [begin, end), two at a time: take(row, panel, sums of the first, sums of the second) receives the results;
// place(row, panel) is the address that it will write to, which is prefetched.
// While tiles multiply, the vector units store the previous results.
template <class Tiles, class Take, class Place>
void by_tiles(const Tiles &tiles, const Rows &rows, int64_t begin, int64_t end, void *scratch, Take take, Place place) {
    alignas(64) float sums[2][2 * Tiles::ROWS * P];
    const int64_t near = std::max(Tiles::ROWS, tiles.near_rows() / Tiles::ROWS * Tiles::ROWS);
    Finished before;
    auto take_some = [&](int64_t count) {
        for (int64_t last = std::min(before.count, before.taken + count); before.taken < last; before.taken++)
            take(before.row + before.taken, before.panel, before.sums + before.taken * P, before.sums + (Tiles::ROWS + before.taken) * P);
    };
    tiles.configure();
    for (int64_t low = 0, turn = 0; low < rows.rows; low += near)
        for (int64_t panel = begin; panel < end; panel += 2) {
            const auto two = tiles.panels(panel, std::min(panel + 1, end - 1), scratch);
            for (int64_t row = low; row < std::min(rows.rows, low + near); row += Tiles::ROWS, turn ^= 1) {
                const int64_t count = std::min(Tiles::ROWS, rows.rows - row);
                int64_t asked = 0;
                tiles.multiply(two, row, count, sums[turn], [&](int64_t parts) {
                    for (int64_t last = std::min(count, asked + parts); asked < last; asked++) {
                        const char *line = (const char *)place(row + asked, panel);
                        __builtin_prefetch(line, 1);
                        __builtin_prefetch(line + 64, 1);
                    }
                    take_some(parts);
                });
                before = {row, count, panel, 0, sums[turn]};
            }
        }
    take_some(Tiles::ROWS);
}

template <class Take, class Place>
void by_tiles(const Matrix &matrix, const Rows &rows, int64_t begin, int64_t end, void *scratch, Take take, Place place) {
    if (begin == end) return;
    if (matrix.kind == OCTAVO_BF16) by_tiles(BF16Tiles{matrix, rows}, rows, begin, end, scratch, take, place);
    else by_digits(matrix, [&](auto digits) { by_tiles(CodeTiles<digits>{matrix, rows}, rows, begin, end, scratch, take, place); });
}

void prepare_amx(const Matrix &matrix, const float *x, const Rows &rows, int64_t row) {
    if (rows.form != Form::INT8) return prepare_row(matrix, x, rows, row);
    const int64_t span = span_of(matrix), spans = rows.stride / span;
    for (int64_t i = 0; i < spans; i++) {
        float local[SPAN];
        const int64_t index = row * spans + i;
        quantize_span512(columns(matrix, x, i * span, span, local), span, rows.codes + row * rows.stride + i * span, rows.scale[index], rows.sum[index]);
    }
}

inline bool by_vectors(const Matrix &matrix, const Rows &rows) {
    return rows.form == Form::FLOAT || (rows.form == Form::INT8 && rows.rows < least_rows(matrix));
}

void product_amx(const Matrix &matrix, const Rows &rows, int64_t panel, int64_t end, float *y, int64_t stride, void *scratch) {
    if (by_vectors(matrix, rows)) return product_by<BF16Choice>(matrix, rows, panel, end, y, stride, scratch);
    auto place = [&](int64_t row, int64_t at) { return y + row * stride + at * P; };
    auto take = [&](int64_t row, int64_t at, const float *first, const float *second) {
        float *to = place(row, at);
        store512(_mm512_add_ps(_mm512_load_ps(first), bias512(matrix, at)), to, matrix.n - at * P);
        if (at + 1 < end) store512(_mm512_add_ps(_mm512_load_ps(second), bias512(matrix, at + 1)), to + P, matrix.n - (at + 1) * P);
    };
    by_tiles(matrix, rows, panel, end, scratch, take, place);
}

inline const void *place_in(const Target &y, int64_t row, int64_t panel) {
    const int64_t index = row * y.stride + panel * P;
    return y.halves ? (const void *)(y.halves + index) : (const void *)(y.values + index);
}

inline __m512 gelu512(__m512 x) { return (__m512)gelu(Lanes{{(Vector)x}}).part[0]; }

void gelu_amx(const Matrix &matrix, const Rows &rows, int64_t panel, int64_t end, const Target &y, void *scratch) {
    auto place = [&](int64_t row, int64_t at) { return place_in(y, row, at); };
    auto take = [&](int64_t row, int64_t at, const float *first, const float *second) {
        put512(gelu512(_mm512_add_ps(_mm512_load_ps(first), bias512(matrix, at))), y, row, at * P, matrix.n - at * P);
        if (at + 1 == end) return;
        put512(gelu512(_mm512_add_ps(_mm512_load_ps(second), bias512(matrix, at + 1))), y, row, (at + 1) * P, matrix.n - (at + 1) * P);
    };
    by_tiles(matrix, rows, panel, end, scratch, take, place);
}

void gate_up_amx(const Matrix &matrix, int activation, const Rows &rows, int64_t pair, int64_t end, const Target &y, void *scratch) {
    if (by_vectors(matrix, rows)) return gate_up_by<BF16Choice>(matrix, activation, rows, pair, end, y, scratch);
    if (activation == OCTAVO_GELU) return gelu_amx(matrix, rows, pair, end, y, scratch);
    auto place = [&](int64_t row, int64_t at) { return place_in(y, row, at / 2); };
    auto take = [&](int64_t row, int64_t at, const float *gate, const float *up) {
        __m512 gates = _mm512_add_ps(_mm512_load_ps(gate), bias512(matrix, at)), ups = _mm512_add_ps(_mm512_load_ps(up), bias512(matrix, at + 1));
        const __m512 value = (__m512)gated(activation, Lanes{{(Vector)gates}}, Lanes{{(Vector)ups}}).part[0];
        put512(value, y, row, at / 2 * P, matrix.n / 2 - at / 2 * P);
    };
    by_tiles(matrix, rows, 2 * pair, 2 * end, scratch, take, place);
}

}  // namespace

void fill_amx(Kernels &kernels) {
    kernels.prepare = prepare_amx;
    kernels.product = product_amx;
    kernels.gate_up = gate_up_amx;
    kernels.attend = attend_amx;
}

}  // namespace octavo
