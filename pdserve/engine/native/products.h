// Matrix products x W^T with W stored as [outputs, inputs], read where it lies.
//
//   dots     few rows of x: dot products along the rows of x and W (dots.h). Bound by memory.
//   lanes    up to 64 rows: x is turned into a panel, once for all outputs, and every weight is broadcast to its rows
//            (panels.h). No weight is moved; only the results are turned back.
//   panels   many rows: 64 outputs at a time are turned into a panel, which serves all rows of x.
#pragma once

#include <algorithm>

#include "panels.h"

enum class Way { DOTS, LANES, PANELS };

// What is faster (docs/performance-log.md): dots up to so many rows, and where a fifth of the lanes would be empty.
template <class W>
INLINE Way way_for(int rows) {
    constexpr int FEW = sizeof(W) == 1 ? 4 : sizeof(W) == 2 ? 12 : 8;
    const int padded = (rows + LANES - 1) / LANES * LANES;
    const bool sparse = sizeof(W) == 2 && rows <= 48 && rows * 5 < padded * 4;
    return rows <= FEW || sparse ? Way::DOTS : rows <= PANEL ? Way::LANES : Way::PANELS;
}

// ---- lanes -----------------------------------------------------------------------------------------

constexpr int LANES_BYTES = 512 << 10;  // of x that every strip of weights meets: half of a second cache

// x [rows, inputs], at most PANEL rows, as one panel for every stretch of `depth` inputs.
template <class X>
struct Lanes {
    float* at;
    int rows, inputs, padded, depth;

    Lanes(float* at, int rows, int inputs) : at(at), rows(rows), inputs(inputs), padded((rows + LANES - 1) / LANES * LANES) {
        depth = std::min(inputs, LANES_BYTES / (padded * int(sizeof(X))) / 64 * 64);
    }
    static constexpr long floats(long inputs) { return PANEL * (inputs + 2 * LANES); }

    INLINE int stretch(int k) const { return std::min(depth, inputs - k); }
    INLINE float* panel(int k) const { return at + long(k / Cell<X>::INPUTS) * padded; }
    void turn(const X* x) {
        for (int k = 0; k < inputs; k += depth)
            pack<X>([&](int i) { return x + long(i) * inputs + k; }, rows, stretch(k), panel(k), padded);
    }
};

// sums [count, lanes] (+)= w [count, inputs] panel, for up to STRIP outputs.
template <class X>
void strip_lanes(const X* w, long ldw, int count, int inputs, const float* panel, int lanes, float* sums, bool fresh, Ahead ahead) {
    with_vectors(lanes, [&](auto vectors) {
        constexpr int V = decltype(vectors)::value, R = V <= 2 ? 8 : 4;
        int n = 0;
        for (; n + R <= count; n += R)
            panel_tile<X, R, V>(w + n * ldw, ldw, inputs, panel, lanes, sums + n * lanes, lanes, fresh, ahead);
        for (; n < count; n++)
            panel_tile<X, 1, V>(w + n * ldw, ldw, inputs, panel, lanes, sums + n * lanes, lanes, fresh, ahead);
    });
}

// Up to sixteen outputs [count, padded] back to rows: out [rows, count].
INLINE void turn_back(const float* sums, int padded, int rows, float* out, long ldo, int count) {
    for (int first = 0; first < rows; first += LANES) {
        f32x16 v[LANES];
        for (int i = 0; i < LANES; i++) v[i] = i < count ? load(sums + i * padded + first) : f32x16{};
        transpose(v);
        for (int i = 0; i < std::min(LANES, rows - first); i++) store(out + (first + i) * ldo, v[i], count);
    }
}

// out [rows, outputs] = x w^T, w [outputs, inputs]; scratch: sums of padded * outputs, wide of STRIP * inputs, in which
// weights of another type are widened.
template <class X, class W>
void lane_rows(const Lanes<X>& x, const W* w, int outputs, float* out, long ldo, Ahead after, float* sums, X* wide) {
    const long ldw = x.inputs;
    for (int k = 0; k < x.inputs; k += x.depth) {
        const int stretch = x.stretch(k);
        for (int n = 0; n < outputs; n += STRIP) {
            const int count = std::min(STRIP, outputs - n);
            const W *strip = w + n * ldw + k, *next = strip + STRIP * ldw;
            Ahead ahead = n + STRIP < outputs ? Ahead{(const char*)next, (const char*)(next + STRIP * ldw)} : after;
            if (stretch < x.inputs) ahead = Ahead{};  // what comes next lies apart
            float* to = sums + long(n) * x.padded;
            if constexpr (std::is_same_v<X, W>) {
                strip_lanes<X>(strip, ldw, count, stretch, x.panel(k), x.padded, to, k == 0, ahead);
            } else {
                widen(strip, ldw, count, stretch, wide, ahead);
                strip_lanes<X>(wide, stretch, count, stretch, x.panel(k), x.padded, to, k == 0, Ahead{});
            }
            if (k + stretch == x.inputs) turn_back(to, x.padded, x.rows, out + n, ldo, count);
        }
    }
}

// ---- panels ----------------------------------------------------------------------------------------

constexpr int DEPTH = 1024;  // inputs of a panel: with its rows of x it stays in the second cache

// out [rows, outputs up to whole vectors] = x [rows, inputs] w^T; panel: scratch of panel_floats<X>(DEPTH).
template <class X, class W>
void many_rows(const X* x, int rows, int inputs, const W* w, int outputs, float* out, long ldo, Ahead after, float* panel) {
    for (int n = 0; n < outputs; n += PANEL) {
        const int columns = std::min(PANEL, outputs - n);
        const W* block = w + long(n) * inputs;
        const bool last = n + PANEL >= outputs;
        for (int k = 0; k < inputs; k += DEPTH) {
            const int depth = std::min(DEPTH, inputs - k);
            pack<X>([&](int i) { return block + long(i) * inputs + k; }, columns, depth, panel);
            times_panel<X>(x + k, inputs, rows, depth, panel, columns, out + n, ldo, k == 0,
                           last && k + depth == inputs ? after : Ahead{});
        }
    }
}
