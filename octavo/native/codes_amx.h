// Products of many rows of codes with AMX. The sums of codes over a span are integers, so they are exact in any order:
//
//     rows of x    A: 16 rows x span           C0, C1 = A4 B6, A4 B7 over one span, C2, C3 = A5 B6, A5 B7 over the next:
//     panels       B: span / 4 quads x 16 n    16 rows times two panels
//
// The vector units scale these sums and add them in the order of the spans, as VnniMath does: both give a row the same bits. Meanwhile
// the tiles compute the next sums.
#pragma once
#include "attention_amx.h"

namespace octavo {
namespace {

template <Digits D> struct CodeTiles {
    static constexpr int64_t ROWS = TILE;          // in a block
    static constexpr int64_t CHUNK = 4;            // spans whose sums are stored before they are scaled
    static constexpr int HALF = 8;                 // rows whose scaled sums for two panels stay in registers
    static constexpr int64_t SUMS = 2 * TILE * P;  // of a span: [2 panels][16][16]
    struct Panels {                                // two panels, one byte per code
        int64_t index[2];
        const uint8_t *codes[2];
    };
    struct Scales {                                // of two panels
        __m512 scale[2], offset[2];
    };
    const Matrix &matrix;
    const Rows &rows;
    const int64_t span = span_of(matrix), spans = rows.stride / span, groups = rows.stride / matrix.group;  // an even number of spans

    void configure() const { load_config(TILE, int(span)); }
    int64_t near_rows() const { return NEAR_BYTES / rows.stride; }

    // 8-bit codes are read in place, and others unpacked into memory.
    Panels panels(int64_t first, int64_t second, void *memory) const {
        Panels two{{first, second}, {}};
        const int64_t size = rows.stride * P;
        for (int i = 0; i < 2; i++) {
            const uint8_t *data = (const uint8_t *)matrix.data + two.index[i] * size / (D == Digits::BYTES ? 1 : 2);
            two.codes[i] = D == Digits::BYTES ? data : unpack(data, (uint8_t *)memory + i * size);
        }
        return two;
    }

    // Up to 16 rows. sums: [2 panels][16][16]. meanwhile: see BF16Tiles
    template <class Meanwhile> void multiply(const Panels &two, int64_t row, int64_t count, float *sums, Meanwhile meanwhile) const {
        alignas(64) int32_t totals[2][CHUNK * SUMS];
        sum_codes(two, row, 0, std::min(CHUNK, spans), totals[0]);
        meanwhile(ROWS);
        int32_t *unstored = nullptr;
        for (int64_t first = 0, turn = 0; first < spans; first += CHUNK, turn ^= 1) {
            const int64_t size = std::min(CHUNK, spans - first), next = first + size, ahead = std::min(CHUNK, spans - next);
            Chunk chunk{row, first, size, {}, totals[turn], sums};
            for (int64_t i = 0; i < size; i++) chunk.scales[i] = load_scales(two, first + i);
            if (unstored && !ahead) store_two(unstored);
            int32_t *to = totals[turn ^ 1];
            if (count == ROWS && ahead) {
                const Source source = source_of(two, row, next);
                add_half<0, true>(chunk, 0, source, unstored ? unstored : to);
                if (ahead > 2) add_half<2, true>(chunk, HALF, source, to);
                else add_half<2, false>(chunk, HALF, source, to);
                unstored = to + (ahead - 2) * SUMS;
            } else {
                if (ahead) sum_codes(two, row, next, ahead, to);
                add_rows(chunk, count);
            }
        }
    }

private:
    struct Source {  // rows and panels from some span on
        const int8_t *x;
        const uint8_t *codes[2];
        int64_t stride, span;
    };
    struct Chunk {   // of spans from `first` on, for the rows from `row` on
        int64_t row, first, size;
        Scales scales[CHUNK];
        const int32_t *totals;
        float *sums;
    };

    const uint8_t *unpack(const uint8_t *from, uint8_t *to) const {
        const __m512i nibble = _mm512_set1_epi8(15);
        __m512i table = _mm512_setzero_si512();
        if (D == Digits::LOOKED_UP) table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)matrix.table));
        for (int64_t i = 0; i < rows.stride * P / 2; i += 64) {
            const __m512i codes = _mm512_loadu_si512(from + i);
            __m512i low = _mm512_and_si512(codes, nibble), high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
            if (D == Digits::LOOKED_UP) low = _mm512_shuffle_epi8(table, low), high = _mm512_shuffle_epi8(table, high);
            _mm512_store_si512(to + 2 * i, low);
            _mm512_store_si512(to + 2 * i + 64, high);
        }
        return to;
    }

    Source source_of(const Panels &two, int64_t row, int64_t at) const {
        return {rows.codes + row * rows.stride + at * span, {two.codes[0] + at * span * P, two.codes[1] + at * span * P}, rows.stride, span};
    }

    Scales load_scales(const Panels &two, int64_t at) const {
        Scales scales;
        for (int i = 0; i < 2; i++) {
            const int64_t place = (two.index[i] * groups + at * span / matrix.group) * P;
            scales.scale[i] = (__m512)load_f16(matrix.scale + place).part[0];
            scales.offset[i] = (__m512)load_f16(matrix.offset + place).part[0];
        }
        return scales;
    }

    // Starts the sums of codes of a panel over a span: the spans from AT on take four steps for every two. What its tile has from the step
    // four before is stored now, as late as possible: so no instruction waits for the previous one. before: of those two spans
    template <int AT, int STEP> INLINE static void start_sums(const Source &source, int32_t *before) {
        const uint8_t *first = source.codes[0] + (AT + STEP / 2) * source.span * P, *second = source.codes[1] + (AT + STEP / 2) * source.span * P;
        const int8_t *x = source.x + (AT + STEP / 2) * source.span;
        if constexpr (STEP == 0) {
            _tile_loadd(4, x, source.stride);
            _tile_loadd(6, first, 64);
            _tile_stored(0, before, 64);
            _tile_zero(0);
            _tile_dpbsud(0, 4, 6);
        } else if constexpr (STEP == 1) {
            _tile_loadd(7, second, 64);
            _tile_stored(1, before + TILE * P, 64);
            _tile_zero(1);
            _tile_dpbsud(1, 4, 7);
        } else if constexpr (STEP == 2) {
            _tile_loadd(5, x, source.stride);
            _tile_loadd(6, first, 64);
            _tile_stored(2, before + SUMS, 64);
            _tile_zero(2);
            _tile_dpbsud(2, 5, 6);
        } else {
            _tile_loadd(7, second, 64);
            _tile_stored(3, before + SUMS + TILE * P, 64);
            _tile_zero(3);
            _tile_dpbsud(3, 5, 7);
        }
    }

    static void store_two(int32_t *to) {
        _tile_stored(0, to, 64);
        _tile_stored(1, to + TILE * P, 64);
        _tile_stored(2, to + SUMS, 64);
        _tile_stored(3, to + SUMS + TILE * P, 64);
    }

    // The sums of codes over `count` spans, without work for the vector units.
    void sum_codes(const Panels &two, int64_t row, int64_t first, int64_t count, int32_t *totals) const {
        for (int64_t i = 0; i < count; i += 2) {
            const Source source = source_of(two, row, first + i);
            int32_t *before = totals + (i ? i - 2 : 0) * SUMS;
            start_sums<0, 0>(source, before);
            start_sums<0, 1>(source, before);
            start_sums<0, 2>(source, before);
            start_sums<0, 3>(source, before);
        }
        store_two(totals + (count - 2) * SUMS);
    }

    // Adds a scaled sum to those before it. See CodeSums, which it must agree with.
    INLINE static void add(const Scales &scales, int panel, const int32_t *total, __m512 x_scale, __m512 x_sum, __m512 &acc) {
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_load_si512(total));
        acc = _mm512_fmadd_ps(whole, _mm512_mul_ps(scales.scale[panel], x_scale), acc);
        acc = _mm512_fmadd_ps(scales.offset[panel], x_sum, acc);
    }

    template <int S> INLINE void add_span(const Chunk &chunk, int64_t at, const float *scale, const float *sum, __m512 (&acc)[HALF][2]) const {
#pragma GCC unroll 8  // here and below: sums must stay in registers
        for (int r = 0; r < HALF; r++) {
            const __m512 x_scale = _mm512_set1_ps(scale[r * spans + S]), x_sum = _mm512_set1_ps(sum[r * spans + S]);
            for (int i = 0; i < 2; i++) add(chunk.scales[S], i, chunk.totals + S * SUMS + (i * TILE + at + r) * P, x_scale, x_sum, acc[r][i]);
        }
    }

    // Adds the scaled sums of a chunk to those of 8 rows. STARTS: of four spans; meanwhile, tiles compute two spans of the next chunk.
    template <int AT, bool STARTS>
    __attribute__((noinline)) void add_half(const Chunk &chunk, int64_t at, const Source &source, int32_t *before) const {
        const int64_t place = (chunk.row + at) * spans + chunk.first;
        const float *scale = rows.scale + place, *sum = rows.sum + place;
        __m512 acc[HALF][2];
#pragma GCC unroll 8
        for (int r = 0; r < HALF; r++)
            for (int i = 0; i < 2; i++) acc[r][i] = chunk.first ? _mm512_load_ps(chunk.sums + (i * TILE + at + r) * P) : _mm512_setzero_ps();
        if (STARTS) start_sums<AT, 0>(source, before);
        add_span<0>(chunk, at, scale, sum, acc);
        if (STARTS) start_sums<AT, 1>(source, before);
        add_span<1>(chunk, at, scale, sum, acc);
        if (STARTS || chunk.size > 2) {
            if (STARTS) start_sums<AT, 2>(source, before);
            add_span<2>(chunk, at, scale, sum, acc);
            if (STARTS) start_sums<AT, 3>(source, before);
            add_span<3>(chunk, at, scale, sum, acc);
        }
        const __m512 factor = _mm512_set1_ps(chunk.first + chunk.size == spans ? matrix.factor : 1.0f);
#pragma GCC unroll 8
        for (int r = 0; r < HALF; r++)
            for (int i = 0; i < 2; i++) _mm512_store_ps(chunk.sums + (i * TILE + at + r) * P, _mm512_mul_ps(acc[r][i], factor));
    }

    void add_rows(const Chunk &chunk, int64_t count) const {
        int64_t at = 0;
        for (; at + HALF <= count; at += HALF) add_half<0, false>(chunk, at, {}, nullptr);
        for (; at < count; at++) add_row(chunk, at);
    }

    __attribute__((noinline)) void add_row(const Chunk &chunk, int64_t at) const {
        const int64_t place = (chunk.row + at) * spans + chunk.first;
        const __m512 factor = _mm512_set1_ps(chunk.first + chunk.size == spans ? matrix.factor : 1.0f);
        for (int i = 0; i < 2; i++) {
            float *sums = chunk.sums + (i * TILE + at) * P;
            __m512 acc = chunk.first ? _mm512_load_ps(sums) : _mm512_setzero_ps();
            for (int64_t s = 0; s < chunk.size; s++)
                add(chunk.scales[s], i, chunk.totals + s * SUMS + (i * TILE + at) * P, _mm512_set1_ps(rows.scale[place + s]),
                    _mm512_set1_ps(rows.sum[place + s]), acc);
            _mm512_store_ps(sums, _mm512_mul_ps(acc, factor));
        }
    }
};

}  // namespace
}  // namespace octavo
