// Panels: up to 64 rows of one operand turned so that a lane holds a row (inputs outermost), then multiplied with one
// broadcast of the other operand per input or pair, or by tiles (tiles.h). No sums over lanes. The arithmetic of all products
// with weights, and of prefill attention.
#pragma once

#include <algorithm>
#include <type_traits>

#include "tiles.h"

constexpr int PANEL = 64;  // most rows of a panel: four vectors

INLINE void transpose(f32x16* v) {  // sixteen rows of sixteen lanes
    f32x16 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = MIX(v[i], v[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        t[i + 1] = MIX(v[i], v[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = i; j < i + 2; j++) {
            v[j] = MIX(t[j], t[j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            v[j + 2] = MIX(t[j], t[j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = i; j < i + 4; j++) {
            t[j] = MIX(v[j], v[j + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            t[j + 4] = MIX(v[j], v[j + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int j = 0; j < 8; j++) {
        v[j] = MIX(t[j], t[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        v[j + 8] = MIX(t[j], t[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

// What a lane of a panel holds. Portable: one input as a float.
template <class X>
struct Cell {
    static constexpr int INPUTS = 1;
    template <class W>
    static INLINE f32x16 of_row(const W* w, int left) {  // up to sixteen cells of one output
        return left >= LANES ? load(w) : load_some(w, left);
    }
    template <class W>
    static INLINE f32x16 of_columns(const W* a, const W*, int count) {  // one input of up to sixteen outputs
        return load(a, count);
    }
    template <class P>
    static INLINE f32x16 cells(const P* panel) { return load(panel); }  // sixteen cells of a panel
    static INLINE f32x16 add(f32x16 sum, const X* x, f32x16 cells) { return sum + to_float(*x) * cells; }
    static INLINE f32x16 add_last(f32x16 sum, const X* x, f32x16 cells) { return add(sum, x, cells); }
};

#ifdef PDSERVE_BF16_DOT
// A pair of inputs in bf16: what one lane of a product instruction takes.
template <>
struct Cell<bf16> {
    static constexpr int INPUTS = 2;
    template <class W>
    static INLINE f32x16 of_row(const W* w, int left) {
        if (left >= 2 * LANES) return (f32x16)Dot<bf16, W>::w(w);
        W some[2 * LANES] = {};
        std::memcpy(some, w, left * sizeof(W));
        return (f32x16)Dot<bf16, W>::w(some);
    }
    template <class W>
    static INLINE f32x16 of_columns(const W* a, const W* b, int count) {  // b: the pair's second input, or null
        f32x16 first = load(a, count), second = b == nullptr ? f32x16{} : load(b, count);
        u32x16 even = __builtin_convertvector((u16x16)_mm512_cvtneps_pbh((__m512)first), u32x16);
        u32x16 odd = __builtin_convertvector((u16x16)_mm512_cvtneps_pbh((__m512)second), u32x16);
        return (f32x16)(even | (odd << 16));
    }
    static INLINE f32x16 cells(const float* panel) { return load(panel); }  // pairs as they are multiplied
    static INLINE f32x16 cells(const bf16* panel) { return load((const float*)panel); }
    static INLINE f32x16 cells(const int8_t* panel) { return (f32x16)Dot<bf16, int8_t>::w(panel); }
    static INLINE f32x16 add(f32x16 sum, const bf16* x, f32x16 cells) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)cells);
    }
    static INLINE f32x16 add_last(f32x16 sum, const bf16* x, f32x16 cells) {  // x has no second input
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x->bits), (__m512bh)cells);
    }
};
#endif

// Floats that a panel of so many inputs takes; whole sixteens of cells, as `pack` writes them.
template <class X>
constexpr long panel_floats(int inputs, int lanes = PANEL) {
    int cells = (inputs + Cell<X>::INPUTS - 1) / Cell<X>::INPUTS;
    return long((cells + LANES - 1) / LANES * LANES) * lanes;
}

// panel [cells, lanes] of the rows row(0) to row(count - 1), each [inputs]; zeros up to whole vectors of rows.
template <class X, class Row>
INLINE void pack(Row row, int count, int inputs, float* panel, int lanes = PANEL) {
    for (int first = 0; first < count; first += LANES)
        for (int k = 0; k < inputs; k += Cell<X>::INPUTS * LANES) {
            f32x16 v[LANES];
            for (int i = 0; i < LANES; i++)
                v[i] = first + i < count ? Cell<X>::of_row(row(first + i) + k, inputs - k) : f32x16{};
            transpose(v);
            float* to = panel + long(k / Cell<X>::INPUTS) * lanes + first;
            for (int i = 0; i < LANES; i++) store(to + i * lanes, v[i]);
        }
}

// out [R, V vectors] (+)= x [R, inputs] panel, whose cells of one input lie `step` elements after those of the one before.
// Every few inputs so many lines are fetched ahead.
template <class X, class P, int R, int V>
void panel_tile(const X* x, long ldx, int inputs, const P* panel, long step, float* out, long ldo, bool fresh, Ahead& ahead, int lines) {
    constexpr int PAIR = Cell<X>::INPUTS, EVERY = 4, CELLS = LANES * (std::is_same_v<P, float> ? 1 : PAIR);
    f32x16 sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = fresh ? f32x16{} : load(out + r * ldo + v * LANES);
    int k = 0;
    for (; k + PAIR * EVERY <= inputs; ahead.fetch(lines))
        for (int i = 0; i < EVERY; i++, k += PAIR, panel += step) {
            f32x16 cells[V];
            for (int v = 0; v < V; v++) cells[v] = Cell<X>::cells(panel + v * CELLS);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) sum[r][v] = Cell<X>::add(sum[r][v], x + r * ldx + k, cells[v]);
        }
    for (; k + PAIR <= inputs; k += PAIR, panel += step)
        for (int v = 0; v < V; v++) {
            f32x16 cells = Cell<X>::cells(panel + v * CELLS);
            for (int r = 0; r < R; r++) sum[r][v] = Cell<X>::add(sum[r][v], x + r * ldx + k, cells);
        }
    if (k < inputs)
        for (int v = 0; v < V; v++) {
            f32x16 cells = Cell<X>::cells(panel + v * CELLS);
            for (int r = 0; r < R; r++) sum[r][v] = Cell<X>::add_last(sum[r][v], x + r * ldx + k, cells);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * ldo + v * LANES, sum[r][v]);
}

// f(N) for n in [1, MOST], as a constant.
template <int MOST, class F>
INLINE void with_constant(int n, F f) {
    if constexpr (MOST > 1)
        if (n < MOST) return with_constant<MOST - 1>(n, f);
    f(std::integral_constant<int, MOST>{});
}

constexpr int most_rows(int vectors) { return vectors == 4 ? 6 : 8; }  // of a tile: sums that the registers hold

// out [rows, columns up to whole vectors] (+)= x [rows, inputs] panel; columns at most PANEL. The rows are cut into tiles
// as even as can be: low ones leave the arithmetic idle. In every pass over the panel a part of what is ahead is fetched.
template <class X, class P>
void times_panel(const X* x, long ldx, int rows, int inputs, const P* panel, long step, int columns, float* out, long ldo, bool fresh,
                 Ahead ahead = {}) {
#ifdef PDSERVE_TILES
    if constexpr (std::is_same_v<X, bf16> && !std::is_same_v<P, int8_t>) {
        const int whole = has_tiles() ? inputs / TILE_INPUTS * TILE_INPUTS : 0;
        if (whole > 0) {
            times_tiles(x, ldx, rows, whole, (const char*)panel, step * long(sizeof(P)), (columns + LANES - 1) / LANES, out, ldo, fresh, ahead);
            if (whole == inputs) return;
            x += whole, inputs -= whole, panel += whole / 2 * step, fresh = false;
        }
    }
#endif
    with_constant<4>((columns + LANES - 1) / LANES, [&](auto vectors) {
        constexpr int V = decltype(vectors)::value, MOST = most_rows(V);
        const int passes = (rows + MOST - 1) / MOST;
        const int lines = std::max(1, 4 * V / passes);
        for (int pass = 0, r = 0; pass < passes; pass++) {
            const int left = passes - pass, some = (rows - r + left - 1) / left;
            with_constant<MOST>(some, [&](auto height) {
                panel_tile<X, P, decltype(height)::value, V>(x + r * ldx, ldx, inputs, panel, step, out + r * ldo, ldo, fresh, ahead, lines);
            });
            r += some;
        }
    });
}
