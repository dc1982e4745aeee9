// Matrices of the same shape one below the other, such as those of experts or heads, and rows that each of them reads.
#pragma once
#include "work.h"

namespace octavo {

inline int64_t bits_of(const Matrix &matrix) {
    return matrix.kind == OCTAVO_F32 ? 32 : matrix.kind == OCTAVO_Q8 ? 8 : matrix.kind == OCTAVO_Q4 ? 4 : 16;
}

// One of `count` matrices. n: its rows, without padding of the last panel
inline Matrix part_of(const Matrix &all, int64_t index, int64_t count, int64_t n) {
    Matrix one = all;
    const int64_t rows = all.n / count, numbers = index * rows * padded(all);
    one.n = n;
    one.data = static_cast<const char *>(all.data) + numbers * bits_of(all) / 8;
    if (has_codes(all)) one.scale = all.scale + numbers / all.group, one.offset = all.offset + numbers / all.group;
    if (all.bias) one.bias = all.bias + index * rows;
    return one;
}

inline int64_t row_bytes(const Rows &rows) { return rows.stride * (rows.form == Form::FLOAT ? 4 : rows.form == Form::INT8 ? 1 : 2); }

inline Rows some_rows(const Matrix &matrix, const Rows &all, int64_t first, int64_t count) {
    const int64_t spans = all.stride / span_of(matrix);
    Rows some = all;
    some.rows = count;
    some.codes = all.codes + first * row_bytes(all);  // all three point to the same bytes
    some.values = reinterpret_cast<float *>(some.codes), some.halves = reinterpret_cast<uint16_t *>(some.codes);
    if (all.scale) some.scale = all.scale + first * spans;
    if (all.sum) some.sum = all.sum + first * spans;
    return some;
}

// With an extra block of rows at the end: the rows of a matrix can start anywhere, and tiles read whole blocks. each: the approximate
// number of rows of each matrix, which determines the format
inline Rows whole_blocks(RowBuffer &buffer, const Matrix &matrix, int64_t count, int64_t each) {
    Rows rows = buffer.get(matrix, count + 32, each);
    rows.rows = count;
    return rows;
}

}  // namespace octavo
