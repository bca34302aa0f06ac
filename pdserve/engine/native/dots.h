// Dot products along both rows: every weight is read once per step, straight from memory, and meets up to four rows of x
// for every load. For few rows of x; bound by memory.
#pragma once

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

// wide [count, inputs] = rows of w, as X.
template <class X, class W>
INLINE void widen(const W* w, long ldw, int count, int inputs, X* wide, Ahead ahead = {}) {
    for (int n = 0; n < count; n++)
        by_lanes(inputs, [&](int i, int some) {
            store(wide + long(n) * inputs + i, load(w + n * ldw + i, some), some);
            ahead.fetch(1);
        });
}

// A strip of int8 weights is widened once when several rows of x will meet it.
template <class X>
void strip_product(const X* x, int rows, int inputs, const int8_t* w, float* out, long ldo, Ahead ahead, X* wide) {
    if (rows <= 2) return strip_product<X, int8_t>(x, rows, inputs, w, out, ldo, ahead);
    widen(w, inputs, STRIP, inputs, wide, ahead);
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
