// Matrix products x W^T with W stored as [outputs, inputs], read where it lies.
//
// Two ways, chosen by the number of rows of x:
//
//   few rows    dot products along both rows: every weight is read once per step, straight from memory, and
//               meets up to four rows of x for every load. Bound by memory.
//   many rows   64 outputs at a time are turned into a panel (inputs outermost), then multiplied with one
//               broadcast of x per input or pair. No sums over lanes, and the panel serves all rows. Bound by
//               arithmetic.
#pragma once

#include <type_traits>

#include "simd.h"

// What will be read next. Fetched a few lines at a time while other work computes, so that memory never rests.
struct Ahead {
    const char* at = nullptr;
    const char* end = nullptr;

    INLINE void fetch(int lines) {
        if (at >= end) return;
        for (int i = 0; i < lines; i++) __builtin_prefetch(at + i * 64, 0, 2);  // into the second cache: the first is full
        at += lines * 64;
    }
};

// ---- how a stretch of one row meets a stretch of another -------------------------------------------

// Portable: sixteen elements as floats.
template <class X, class W>
struct Dot {
    static constexpr int STEP = LANES;
    typedef f32x16 Part;
    static INLINE Part x(const X* p) { return load(p); }
    static INLINE Part w(const W* p) { return load(p); }
    static INLINE f32x16 add(f32x16 sum, Part a, Part b) { return sum + a * b; }
};

#ifdef PDSERVE_BF16_DOT
// Thirty-two elements, two products per lane and instruction, added in fp32.
struct Bf16Dot {
    static constexpr int STEP = 2 * LANES;
    typedef __m512bh Part;
    static INLINE Part x(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static INLINE f32x16 add(f32x16 sum, Part a, Part b) { return (f32x16)_mm512_dpbf16_ps((__m512)sum, a, b); }
};
template <>
struct Dot<bf16, bf16> : Bf16Dot {
    static INLINE Part w(const bf16* p) { return x(p); }
};
template <class W>
struct NarrowedDot : Bf16Dot {  // every int8 is a bf16; a float is rounded
    static INLINE Part w(const W* p) { return _mm512_cvtne2ps_pbh((__m512)load(p + LANES), (__m512)load(p)); }
};
template <>
struct Dot<bf16, int8_t> : NarrowedDot<int8_t> {};
template <>
struct Dot<bf16, float> : NarrowedDot<float> {};
#endif

// ---- few rows --------------------------------------------------------------------------------------

constexpr int STRIP = 16;  // outputs whose weights stay in the first cache while all rows of x meet them

// out[r][n] = x[r] . w[n] for R rows of x and N rows of w, R * N == 16; out has a row every ldo. The strip is passed over
// so many times: what comes after it is fetched evenly in all of them.
template <class X, class W, int R, int N>
INLINE void dot_tile(const X* x, int inputs, const W* w, float* out, long ldo, Ahead& ahead, int passes) {
    typedef Dot<X, W> D;
    const long ldx = inputs, ldw = inputs;
    const int lines = (N * D::STEP * int(sizeof(W)) / 64 + passes - 1) / passes;
    f32x16 sum[R * N] = {};
    int k = 0;
    for (; k + D::STEP <= inputs; k += D::STEP) {
        typename D::Part row[R];
        for (int r = 0; r < R; r++) row[r] = D::x(x + r * ldx + k);
        for (int n = 0; n < N; n++) {
            typename D::Part part = D::w(w + n * ldw + k);
            for (int r = 0; r < R; r++) sum[r * N + n] = D::add(sum[r * N + n], row[r], part);
        }
        ahead.fetch(lines);
    }
    for (; k < inputs; k += LANES) {  // what is left of the rows
        int count = inputs - k < LANES ? inputs - k : LANES;
        for (int n = 0; n < N; n++) {
            f32x16 part = load(w + n * ldw + k, count);
            for (int r = 0; r < R; r++) sum[r * N + n] += load(x + r * ldx + k, count) * part;
        }
    }
    f32x16 total = sums(sum);
    for (int r = 0; r < R; r++) std::memcpy(out + r * ldo, (float*)&total + r * N, N * sizeof(float));
}

template <class X, class W>
INLINE float dot(const X* x, const W* w, int inputs) {
    f32x16 total = {};
    by_lanes(inputs, [&](int k, int count) { total += load(x + k, count) * load(w + k, count); });
    return sum(total);
}

// One strip: out [rows, STRIP] = x [rows, inputs] w [STRIP, inputs]^T.
template <class X, class W>
void strip_product(const X* x, int rows, int inputs, const W* w, float* out, long ldo, Ahead ahead) {
    const long line = inputs;
    const int passes = rows / 4 + (rows % 4 >= 2) + rows % 2;
    int r = 0;
    for (; r + 4 <= rows; r += 4)
        for (int n = 0; n < STRIP; n += 4)
            dot_tile<X, W, 4, 4>(x + r * line, inputs, w + n * line, out + r * ldo + n, ldo, ahead, passes);
    if (rows - r >= 2) {
        for (int n = 0; n < STRIP; n += 8)
            dot_tile<X, W, 2, 8>(x + r * line, inputs, w + n * line, out + r * ldo + n, ldo, ahead, passes);
        r += 2;
    }
    if (rows - r) dot_tile<X, W, 1, 16>(x + r * line, inputs, w, out + r * ldo, ldo, ahead, passes);
}

// A strip of int8 weights is widened once when several rows of x will meet it.
template <class X>
void strip_product(const X* x, int rows, int inputs, const int8_t* w, float* out, long ldo, Ahead ahead, X* wide) {
    if (rows <= 2) return strip_product<X, int8_t>(x, rows, inputs, w, out, ldo, ahead);
    by_lanes(STRIP * inputs, [&](int i, int count) {
        store(wide + i, load(w + i, count), count);
        ahead.fetch(1);
    });
    strip_product<X, X>(x, rows, inputs, wide, out, ldo, Ahead{});
}

template <class X>
void strip_product(const X* x, int rows, int inputs, const X* w, float* out, long ldo, Ahead ahead, X*) {
    strip_product<X, X>(x, rows, inputs, w, out, ldo, ahead);
}

// out [rows, outputs] = x [rows, inputs] w [outputs, inputs]^T; wide: scratch of STRIP * inputs.
template <class X, class W>
void few_rows(const X* x, int rows, int inputs, const W* w, int outputs, float* out, long ldo, Ahead after, X* wide) {
    int n = 0;
    for (; n + STRIP <= outputs; n += STRIP) {
        const W* strip = w + long(n) * inputs;
        const W* next = strip + long(STRIP) * inputs;
        bool last = n + 2 * STRIP > outputs;
        Ahead ahead = last ? after : Ahead{(const char*)next, (const char*)(next + long(STRIP) * inputs)};
        strip_product(x, rows, inputs, strip, out + n, ldo, ahead, wide);
    }
    for (; n < outputs; n++)
        for (int r = 0; r < rows; r++) out[r * ldo + n] = dot(x + long(r) * inputs, w + long(n) * inputs, inputs);
}

// ---- many rows -------------------------------------------------------------------------------------

constexpr int PANEL = 64;  // outputs of a panel: four vectors

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
constexpr long panel_floats(int inputs) {
    int cells = (inputs + Cell<X>::INPUTS - 1) / Cell<X>::INPUTS;
    return long((cells + LANES - 1) / LANES * LANES) * PANEL;
}

// panel [cells, PANEL] of the rows row(0) to row(outputs - 1), each [inputs]; zeros beyond.
template <class X, class Row>
INLINE void pack(Row row, int outputs, int inputs, float* panel) {
    for (int first = 0; first < PANEL && first < outputs; first += 16)
        for (int k = 0; k < inputs; k += Cell<X>::INPUTS * LANES) {
            f32x16 v[16];
            for (int i = 0; i < 16; i++)
                v[i] = first + i < outputs ? Cell<X>::of_row(row(first + i) + k, inputs - k) : f32x16{};
            transpose(v);
            float* to = panel + long(k / Cell<X>::INPUTS) * PANEL + first;
            for (int i = 0; i < 16; i++) store(to + i * PANEL, v[i]);
        }
}

// out [R, V vectors] (+)= x [R, inputs] panel
template <class X, int R, int V>
void panel_tile(const X* x, long ldx, int inputs, const float* panel, float* out, long ldo, bool fresh, Ahead& ahead) {
    f32x16 sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = fresh ? f32x16{} : load(out + r * ldo + v * LANES);
    int k = 0;
    for (; k + Cell<X>::INPUTS <= inputs; k += Cell<X>::INPUTS, panel += PANEL) {
        f32x16 cells[V];
        for (int v = 0; v < V; v++) cells[v] = load(panel + v * LANES);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] = Cell<X>::add(sum[r][v], x + r * ldx + k, cells[v]);
        ahead.fetch(2);
    }
    if (k < inputs)
        for (int v = 0; v < V; v++) {
            f32x16 cells = load(panel + v * LANES);
            for (int r = 0; r < R; r++) sum[r][v] = Cell<X>::add_last(sum[r][v], x + r * ldx + k, cells);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * ldo + v * LANES, sum[r][v]);
}

template <class X, int V>
void times_panel(const X* x, long ldx, int rows, int inputs, const float* panel, float* out, long ldo, bool fresh, Ahead& ahead) {
    int r = 0;
    auto tiles = [&](auto height, int until) {
        constexpr int R = decltype(height)::value;
        for (; r + R <= until; r += R)
            panel_tile<X, R, V>(x + r * ldx, ldx, inputs, panel, out + r * ldo, ldo, fresh, ahead);
    };
    // Sixes and fives as far as they come out even: fewer rows leave the arithmetic idle.
    int fives = (6 - rows % 6) % 6;
    if (rows < 5 * fives) fives = 0;
    tiles(std::integral_constant<int, 6>{}, rows - 5 * fives);
    tiles(std::integral_constant<int, 5>{}, rows);
    tiles(std::integral_constant<int, 2>{}, rows);
    tiles(std::integral_constant<int, 1>{}, rows);
}

// out [rows, columns up to whole vectors] (+)= x [rows, inputs] panel; columns at most PANEL.
template <class X>
void times_panel(const X* x, long ldx, int rows, int inputs, const float* panel, int columns, float* out, long ldo,
                 bool fresh, Ahead ahead = {}) {
    switch ((columns + LANES - 1) / LANES) {
        case 1: return times_panel<X, 1>(x, ldx, rows, inputs, panel, out, ldo, fresh, ahead);
        case 2: return times_panel<X, 2>(x, ldx, rows, inputs, panel, out, ldo, fresh, ahead);
        case 3: return times_panel<X, 3>(x, ldx, rows, inputs, panel, out, ldo, fresh, ahead);
        default: return times_panel<X, 4>(x, ldx, rows, inputs, panel, out, ldo, fresh, ahead);
    }
}

constexpr int DEPTH = 1024;  // inputs of a panel: with its rows of x it stays in the second cache

// out [rows, outputs up to whole vectors] = x [rows, inputs] w^T; panel: scratch of panel_floats<X>(DEPTH).
template <class X, class W>
void many_rows(const X* x, int rows, int inputs, const W* w, int outputs, float* out, long ldo, Ahead after, float* panel) {
    for (int n = 0; n < outputs; n += PANEL) {
        int columns = outputs - n < PANEL ? outputs - n : PANEL;
        const W* block = w + long(n) * inputs;
        bool last = n + PANEL >= outputs;
        for (int k = 0; k < inputs; k += DEPTH) {
            int depth = inputs - k < DEPTH ? inputs - k : DEPTH;
            pack<X>([&](int i) { return block + long(i) * inputs + k; }, columns, depth, panel);
            Ahead ahead = last && k + depth == inputs ? after : Ahead{};
            times_panel<X>(x + k, inputs, rows, depth, panel, columns, out + n, ldo, k == 0, ahead);
        }
    }
}

// Up to so many rows of x the dot products are faster (docs/performance-log.md).
template <class W>
constexpr int FEW = sizeof(W) == 1 ? 4 : sizeof(W) == 2 ? 48 : 8;
