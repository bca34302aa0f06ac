// Products by tile instructions (AMX), where the processor has them: sixteen rows by sixteen outputs and 32 inputs at a time.
// They read a panel of pairs of bf16 as it lies. A row's result does not depend on how many rows there are.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "dots.h"

constexpr int TILE = 16;          // most rows of a tile, and outputs of one
constexpr int TILE_INPUTS = 32;   // a tile of x is [rows, 32], one of a panel [16 pairs, 16 outputs]
constexpr int TILE_ROWS = 2 * TILE;

#if defined(PDSERVE_BF16_DOT) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define PDSERVE_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

// Whether the system lets this process use them: it must be asked, once, for all threads.
static bool has_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool has = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return has;
}

// Rows of x that this thread's tiles are set up for; 0: for none. While they are, a switch of threads saves 8 KiB more.
static thread_local int tile_rows = 0;

// Tiles 0 and 1 [first rows, 16] and 2 and 3 [further rows, 16] are sums, 4 and 5 rows of x, 6 and 7 of a panel. With
// sixteen rows or less 0 to 3 are sums of four times sixteen outputs.
INLINE void set_tiles(int rows) {
    if (tile_rows == rows) return;
    struct alignas(64) Shapes {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    const int first = std::min(rows, TILE), further = rows > TILE ? rows - TILE : first;
    const int heights[8] = {first, first, further, further, first, further, TILE, TILE};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = uint8_t(heights[i]);
    asm volatile("ldtilecfg %0" : : "m"(shapes));  // the compiler's own says that it reads eight bytes of them
    tile_rows = rows;
}

// At the end of a thread's work: other libraries set tiles up in their own ways.
INLINE void release_tiles() {
    if (tile_rows) _tile_release();
    tile_rows = 0;
}

#define ZERO_SUMS            \
    {                        \
        _tile_zero(0);       \
        _tile_zero(1);       \
        _tile_zero(2);       \
        _tile_zero(3);       \
    }
#define LOAD_SUM(tile, row, column) _tile_loadd(tile, out + (row) * ldo + (column), ldo * 4)
#define STORE_SUM(tile, row, column) _tile_stored(tile, out + (row) * ldo + (column), ldo * 4)
#define LOAD_X(tile, row) _tile_loadd(tile, x + (row) * ldx + k, ldx * 2)
#define LOAD_PANEL(tile, v) _tile_loadd(tile, panel + k / 2 * step + (v) * 64, step)

// out [17 to 32 rows, V vectors] (+)= x panel; `inputs` in whole TILE_INPUTS, `step` in bytes.
template <int V>
static void tall_block(const bf16* x, long ldx, int inputs, const char* panel, long step, float* out, long ldo, bool fresh, Ahead& ahead, int lines) {
    if (!fresh) {
        LOAD_SUM(0, 0, 0);
        LOAD_SUM(2, TILE, 0);
        if constexpr (V > 1) {
            LOAD_SUM(1, 0, TILE);
            LOAD_SUM(3, TILE, TILE);
        }
    } else ZERO_SUMS;
    for (int k = 0; k < inputs; k += TILE_INPUTS) {
        LOAD_PANEL(6, 0);
        LOAD_X(4, 0);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (V > 1) {
            LOAD_PANEL(7, 1);
            _tile_dpbf16ps(1, 4, 7);
        }
        LOAD_X(5, TILE);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (V > 1) _tile_dpbf16ps(3, 5, 7);
        ahead.fetch(lines);
    }
    STORE_SUM(0, 0, 0);
    STORE_SUM(2, TILE, 0);
    if constexpr (V > 1) {
        STORE_SUM(1, 0, TILE);
        STORE_SUM(3, TILE, TILE);
    }
}

// The same for up to sixteen rows and up to four vectors.
template <int V>
static void low_block(const bf16* x, long ldx, int inputs, const char* panel, long step, float* out, long ldo, bool fresh, Ahead& ahead, int lines) {
    if (!fresh) {
        LOAD_SUM(0, 0, 0);
        if constexpr (V > 1) LOAD_SUM(1, 0, TILE);
        if constexpr (V > 2) LOAD_SUM(2, 0, 2 * TILE);
        if constexpr (V > 3) LOAD_SUM(3, 0, 3 * TILE);
    } else ZERO_SUMS;
    for (int k = 0; k < inputs; k += TILE_INPUTS) {
        LOAD_X(4, 0);
        LOAD_PANEL(6, 0);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (V > 1) {
            LOAD_PANEL(7, 1);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (V > 2) {
            LOAD_PANEL(6, 2);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (V > 3) {
            LOAD_PANEL(7, 3);
            _tile_dpbf16ps(3, 4, 7);
        }
        ahead.fetch(lines);
    }
    STORE_SUM(0, 0, 0);
    if constexpr (V > 1) STORE_SUM(1, 0, TILE);
    if constexpr (V > 2) STORE_SUM(2, 0, 2 * TILE);
    if constexpr (V > 3) STORE_SUM(3, 0, 3 * TILE);
}

#undef ZERO_SUMS
#undef LOAD_SUM
#undef STORE_SUM
#undef LOAD_X
#undef LOAD_PANEL

// out [rows, vectors] (+)= x [rows, inputs] panel, for inputs in whole TILE_INPUTS. A panel's half stays in the first cache.
static void times_tiles(const bf16* x, long ldx, int rows, int inputs, const char* panel, long step, int vectors, float* out, long ldo,
                        bool fresh, Ahead ahead) {
    asm volatile("" ::: "memory");  // tiles are loaded behind the compiler's back
    typedef void (*Block)(const bf16*, long, int, const char*, long, float*, long, bool, Ahead&, int);
    static constexpr Block tall[] = {tall_block<1>, tall_block<2>}, low[] = {low_block<1>, low_block<2>, low_block<3>, low_block<4>};
    const int wide = rows > TILE ? 2 : 4;  // vectors at a time
    const int passes = (rows + TILE_ROWS - 1) / TILE_ROWS * ((vectors + wide - 1) / wide), lines = std::max(1, TILE * vectors / passes);
    for (int v = 0; v < vectors; v += wide)
        for (int r = 0; r < rows; r += TILE_ROWS) {
            const int some = std::min(rows - r, TILE_ROWS), columns = std::min(wide, vectors - v);
            const Block block = (some > TILE ? tall : low)[columns - 1];
            set_tiles(some);
            block(x + r * ldx, ldx, inputs, panel + v * 64, step, out + r * ldo + v * TILE, ldo, fresh, ahead, lines);
        }
}
#else
INLINE bool has_tiles() { return false; }
INLINE void release_tiles() {}
#endif
