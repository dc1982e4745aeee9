// AMX: a tile is 16 rows of 64 bytes. Each kernel that uses tiles loads their shapes first.
#pragma once
#include "attention512.h"

namespace octavo {
namespace {

const int64_t TILE = 16, BLOCK = 2 * TILE;       // rows of a tile; rows of x in two tiles

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 are results, 4 and 5 are read from the left: `rows` rows, of which 4 and 5 have `bytes` bytes. Tiles 6 and 7 are read
// from the right: bytes / 4 rows.
inline void load_config(int64_t rows, int64_t bytes) {
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = uint8_t(tile < 6 ? rows : bytes / 4);
        config.bytes[tile] = uint16_t(tile == 4 || tile == 5 ? bytes : 64);
    }
    asm volatile("" ::"r"(&config) : "memory");  // the compiler must neither drop this store nor move the use of tiles before it
    _tile_loadconfig(&config);
    asm volatile("" ::: "memory");
}

}  // namespace
}  // namespace octavo
