// How a stretch of one row meets a stretch of another: the arithmetic of decode's scores.
#pragma once

#include "simd.h"

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
