// Matrix products x W^T with W stored in panels (panels.h): packed once, when the kernels take a model over (packed.py),
// so that memory is read from front to back and nothing is turned again, however many rows there are.
//
//     outputs    in groups (a head, or what one panel holds), each of panels of `lanes` outputs, filled up with zeros
//     panel      [cells, lanes]; a cell is an input, or a pair of them where bf16 is multiplied in pairs
#pragma once

#include "abi.h"
#include "panels.h"

constexpr int DEPTH = 2048;       // inputs at a time: a stretch of a panel stays in the second cache, rows of x in the first
constexpr int WIDE_PASSES = 2;    // more passes over a panel than these, and int8 is widened before
constexpr int WIDE_ROWS = 4;      // the same for tiles, which do not read int8
constexpr long AHEAD = 256 << 10; // bytes fetched before their turn comes
constexpr int FEW_ROWS = 4;

// Whether instructions fetch what is ahead, or the processor alone does, which is faster for one thread that passes over
// a panel once, but not where there are tiles (docs/performance-log.md).
INLINE bool fetches(int threads, int rows, int lanes) { return has_tiles() || rows > most_rows(lanes / LANES) || (threads > 1 && rows <= FEW_ROWS); }

template <class X, class W>
struct Panels {
    const W* at;
    int inputs, group, lanes, each;  // each: panels of a group
    long size;                       // elements of a panel

    explicit Panels(const Matrix& w) : at((const W*)w.weight), inputs(w.inputs), group(w.group), lanes(w.lanes) {
        constexpr int PAIR = Cell<X>::INPUTS;
        each = (group + lanes - 1) / lanes;
        size = long(inputs + PAIR - 1) / PAIR * PAIR * lanes;
    }
    INLINE int columns() const { return each * lanes; }  // of a tile
    INLINE const W* panel(long number) const { return at + number * size; }
    INLINE Ahead ahead(long number) const {
        const char* first = (const char*)panel(number);
        return Ahead{first, first + std::min(size * long(sizeof(W)), AHEAD)};
    }
};

// Floats of scratch that a product of so many inputs takes: a stretch of a panel, widened.
template <class X>
INLINE long wide_floats(long inputs) {
    return (std::min(inputs, long(DEPTH)) + Cell<X>::INPUTS - 1) / Cell<X>::INPUTS * PANEL;
}

// out [rows, lanes] = x [rows, inputs] w^T for the outputs of one panel.
template <class X, class W>
void panel_product(const Panels<X, W>& w, long number, const X* x, int rows, float* out, long ldo, Ahead ahead, float* wide) {
    constexpr int PAIR = Cell<X>::INPUTS;
    const bool widen = !std::is_same_v<X, W> && rows > (has_tiles() ? WIDE_ROWS : WIDE_PASSES * most_rows(w.lanes / LANES));
    for (int k = 0; k < w.inputs; k += DEPTH) {
        const int depth = std::min(DEPTH, w.inputs - k);
        const W* from = w.panel(number) + long(k) * w.lanes;
        if (!widen) {
            times_panel<X, W>(x + k, w.inputs, rows, depth, from, long(w.lanes) * PAIR, w.lanes, out, ldo, k == 0, ahead);
            continue;
        }
        const long cells = long(depth + PAIR - 1) / PAIR * w.lanes;
        for (long i = 0; i < cells; i += LANES) store(wide + i, Cell<X>::cells(from + i * PAIR));
        times_panel<X, float>(x + k, w.inputs, rows, depth, wide, w.lanes, w.lanes, out, ldo, k == 0, ahead);
    }
}
