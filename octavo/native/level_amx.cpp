// AMX: a tile is 16 rows of 64 bytes, and one instruction multiplies 16 x 32 by 32 x 16 numbers of bfloat16. For large batches.
//
//     rows of x    A: 16 rows x 32 k              C0 += A0 B0   C1 += A0 B1      four tiles of results for every four that are
//     panel        B: 16 pairs of k x 16 n        C2 += A1 B0   C3 += A1 B1      loaded: 32 rows times two panels
#include <type_traits>

#include "attention_amx.h"

namespace octavo {
namespace {

const int64_t TILE = 16, BLOCK = 2 * TILE;      // rows of a tile; rows of x in two tiles
const int64_t NEAR_HALVES = 1 << 19;             // numbers of x that stay in the L2 cache while panels are read
const int64_t AT_LEAST = 9;                      // rows: fewer are faster one by one

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// 32 rows of x times two panels. sums: [2 panels][32][16]. meanwhile(k) is called for every 32 k, for work that needs no tiles.
template <class Meanwhile>
inline void multiply_tiles(const uint16_t *x, int64_t stride, const uint16_t *first, const uint16_t *second, float *sums, Meanwhile meanwhile) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < stride; k += 32) {
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(6, first + k * P, 64);
        _tile_loadd(7, second + k * P, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + TILE * stride + k, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        meanwhile(k);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(2, sums + TILE * P, 64);
    _tile_stored(1, sums + BLOCK * P, 64);
    _tile_stored(3, sums + BLOCK * P + TILE * P, 64);
}

// Unpacks codes to bfloat16, for large batches: 32 k of a panel at a time, to [16 pairs of k][16][2].
//
// A code is shifted into the top fraction bits of a float 1.0, which makes it 1 + code / 16 (or / 256); an adjusted scale
// and offset convert that to the weight.
template <Digits D> struct Unpacker {
    static const bool FOUR = D != Digits::BYTES, SMALL = D == Digits::NIBBLES;
    const Matrix &matrix;
    const int64_t stride, groups = stride / matrix.group, span = std::min<int64_t>(32, matrix.group);
    const __m512 factor = _mm512_set1_ps(matrix.factor), steps = _mm512_set1_ps(matrix.factor * (SMALL ? 16 : 256));
    const __m512i one = _mm512_set1_epi32(0x3f800000), digits = _mm512_set1_epi32(SMALL ? 0x00780000 : 0x007f8000);
    const __m512i interleave = interleave512();

    void operator()(int64_t panel, int64_t k, uint16_t *to) const {
        const uint8_t *w = (const uint8_t *)matrix.data + (panel * stride + k) * P / (FOUR ? 2 : 1);
        for (int64_t end = k + 32; k < end; k += span) {
            int64_t place = (panel * groups + k / matrix.group) * P;
            __m512 scale = _mm512_mul_ps(steps, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(matrix.scale + place))));
            __m512 offset = _mm512_fmsub_ps(factor, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(matrix.offset + place))), scale);
            auto value = [&](__m512i shifted) {  // (shifted & digits) | one
                return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(shifted, digits, one, 0xea)), scale, offset);
            };
            auto put = [&](__m512i first, __m512i second) {
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(value(second), value(first));
                _mm512_storeu_si512(to, _mm512_permutexvar_epi16(interleave, both));
                to += 32;
            };
            auto put_bytes = [&](__m512i codes) {
                put(_mm512_slli_epi32(codes, 15), _mm512_slli_epi32(codes, 7));
                put(_mm512_srli_epi32(codes, 1), _mm512_srli_epi32(codes, 9));
            };
            for (int64_t i = 0; i < span; i += FOUR ? 8 : 4, w += 64) {
                __m512i codes = _mm512_loadu_si512(w);
                if constexpr (D == Digits::LOOKED_UP) {
                    const Words words{{(Integers)codes}};
                    put_bytes((__m512i)looked_up(low_digits(words), matrix.table).part[0]);
                    codes = (__m512i)looked_up(high_digits(words), matrix.table).part[0];
                } else if (SMALL) {
                    put(_mm512_slli_epi32(codes, 19), _mm512_slli_epi32(codes, 11));
                    put(_mm512_slli_epi32(codes, 3), _mm512_srli_epi32(codes, 5));
                }
                put_bytes(codes);
            }
        }
    }
};

struct Stored {  // panels of bfloat16: used in place
    void operator()(int64_t, int64_t, uint16_t *) const {}
};

struct Finished {  // sums of 32 rows and two panels that are not stored yet
    int64_t row, count, panel, taken;
    const float *sums;
};

// All rows times panels [begin, end), two at a time: take(row, panel, sums of the first, sums of the second) receives the results;
// place(row, panel) is the address that it will write to, which is prefetched.
// While tiles multiply, the vector units store the previous results, and unpack the next pair of panels.
template <class Unpack, class Take, class Place>
void by_tiles(const Matrix &matrix, const Rows &rows, int64_t begin, int64_t end, const Unpack &unpack, void *scratch, Take take, Place place) {
    alignas(64) float sums[2][2 * BLOCK * P];
    const bool stored = std::is_same<Unpack, Stored>::value;
    const int64_t stride = rows.stride, size = stride * P, near = std::max(BLOCK, NEAR_HALVES / stride / BLOCK * BLOCK);
    uint16_t *now = (uint16_t *)scratch, *next = now + 2 * size;
    auto unpack_pair = [&](int64_t panel, int64_t k, uint16_t *to) {
        unpack(panel, k, to + k * P);
        unpack(std::min(panel + 1, end - 1), k, to + size + k * P);
    };
    Finished before{};
    auto take_some = [&](int64_t count) {
        for (int64_t last = std::min(before.count, before.taken + count); before.taken < last; before.taken++)
            take(before.row + before.taken, before.panel, before.sums + before.taken * P, before.sums + (BLOCK + before.taken) * P);
    };
    const int64_t at_once = (BLOCK * 32 + stride - 1) / stride;
    for (int64_t low = 0, turn = 0; low < rows.rows; low += near) {
        for (int64_t k = 0; !stored && k < stride; k += 32) unpack_pair(begin, k, now);
        for (int64_t panel = begin; panel < end; panel += 2) {
            const uint16_t *first = stored ? (const uint16_t *)matrix.data + panel * size : now;
            const uint16_t *second = stored && panel + 1 == end ? first : first + size;
            for (int64_t row = low; row < std::min(rows.rows, low + near); row += BLOCK, turn ^= 1) {
                const bool ahead = !stored && row == low && panel + 2 < end;
                const int64_t count = std::min(BLOCK, rows.rows - row);
                int64_t asked = 0;
                multiply_tiles(rows.halves + row * stride, stride, first, second, sums[turn], [&](int64_t k) {
                    for (int64_t i = 0; i < at_once && asked < count; i++, asked++) {
                        const char *line = (const char *)place(row + asked, panel);
                        __builtin_prefetch(line, 1);
                        __builtin_prefetch(line + 64, 1);
                    }
                    take_some(at_once);
                    if (ahead) unpack_pair(panel + 2, k, next);
                });
                before = {row, count, panel, 0, sums[turn]};
            }
            std::swap(now, next);
        }
    }
    take_some(BLOCK);
}

template <class Take, class Place>
void by_tiles(const Matrix &matrix, const Rows &rows, int64_t begin, int64_t end, void *scratch, Take take, Place place) {
    if (begin == end) return;
    if (matrix.kind == OCTAVO_BF16) by_tiles(matrix, rows, begin, end, Stored{}, scratch, take, place);
    else by_digits(matrix, [&](auto digits) { by_tiles(matrix, rows, begin, end, Unpacker<digits>{matrix, rows.stride}, scratch, take, place); });
}

// Codes are multiplied as codes in small batches, and unpacked for larger ones.
Form form_amx(const Matrix &matrix, int64_t rows) { return has_codes(matrix) && rows > FEW ? Form::BF16 : BF16Choice::form(matrix, rows); }

inline bool by_vectors(const Matrix &matrix, const Rows &rows) {
    return rows.form != Form::BF16 || (matrix.kind == OCTAVO_BF16 && rows.rows < AT_LEAST);
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
        __m512 value = activation == OCTAVO_SWIGLU ? _mm512_mul_ps(silu512(gates), ups)
                                                   : (__m512)gated(activation, Lanes{{(Vector)gates}}, Lanes{{(Vector)ups}}).part[0];
        put512(value, y, row, at / 2 * P, matrix.n / 2 - at / 2 * P);
    };
    by_tiles(matrix, rows, 2 * pair, 2 * end, scratch, take, place);
}

void start_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = TILE;
        config.bytes[tile] = 64;
    }
    asm volatile("" ::"r"(&config) : "memory");  // the compiler must neither drop this store nor move the use of tiles before it
    _tile_loadconfig(&config);
    asm volatile("" ::: "memory");
}

}  // namespace

void fill_amx(Kernels &kernels) {
    kernels.start = start_tiles;
    kernels.form = form_amx;
    kernels.product = product_amx;
    kernels.gate_up = gate_up_amx;
    kernels.attend = attend_amx;
}

}  // namespace octavo
