// Sixteen floats at a time, on any processor.
//
// Everything is written once, with the compiler's portable vector types; GCC and clang turn them into
// whatever the processor has. Instructions are named only where the portable code cannot say them
// (products of bf16 pairs) or comes out slow (int8 to float). PDSERVE_PORTABLE leaves those out too.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && !defined(PDSERVE_PORTABLE)
#include <immintrin.h>
#define PDSERVE_AVX512 1
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PDSERVE_BF16_DOT 1
#endif
#endif

#define INLINE inline __attribute__((always_inline))

struct bf16 {
    uint16_t bits;
};

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

constexpr int LANES = 16;

INLINE f32x16 splat(float value) { return value - f32x16{}; }

// ---- loads and stores: any alignment, any of the stored types ------------------------------------

INLINE f32x16 load(const float* p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

INLINE f32x16 load(const bf16* p) {
    u16x16 v;
    std::memcpy(&v, p, sizeof v);
    return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
}

INLINE f32x16 load(const int8_t* p) {
#ifdef PDSERVE_AVX512
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    i8x16 v;
    std::memcpy(&v, p, sizeof v);
    return __builtin_convertvector(__builtin_convertvector(v, i32x16), f32x16);
#endif
}

INLINE void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

// To the nearest bf16, ties to even; a NaN stays one.
INLINE void store(bf16* p, f32x16 v) {
#ifdef PDSERVE_BF16_DOT
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &narrow, sizeof narrow);
#else
    u32x16 bits = (u32x16)v;
    u32x16 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    u32x16 is_nan = (u32x16)(v != v);
    rounded = (is_nan & (bits | 0x400000)) | (~is_nan & rounded);
    u16x16 narrow = __builtin_convertvector(rounded >> 16, u16x16);
    std::memcpy(p, &narrow, sizeof narrow);
#endif
}

// The first `count` (1 to 15) of sixteen; the rest is zero, or left as it is.
template <class T>
INLINE f32x16 load_some(const T* p, int count) {
    T some[LANES] = {};
    std::memcpy(some, p, sizeof(T) * count);
    return load(some);
}

template <class T>
INLINE void store_some(T* p, f32x16 v, int count) {
    T some[LANES];
    store(some, v);
    std::memcpy(p, some, sizeof(T) * count);
}

// f(first, count) for every group of up to sixteen of n.
template <class F>
INLINE void by_lanes(int n, F f) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) f(i, LANES);
    if (i < n) f(i, n - i);
}

template <class T>
INLINE f32x16 load(const T* p, int count) {
    return count == LANES ? load(p) : load_some(p, count);
}

template <class T>
INLINE void store(T* p, f32x16 v, int count) {
    if (count == LANES) store(p, v);
    else store_some(p, v, count);
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// ---- sums and maxima over lanes -------------------------------------------------------------------

#define MIX __builtin_shufflevector

// Sums of two vectors' neighbouring lanes, interleaved; four levels of it turn sixteen vectors into
// the vector of their sums.
INLINE f32x16 add_1(f32x16 a, f32x16 b) {
    return MIX(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           MIX(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
INLINE f32x16 add_2(f32x16 a, f32x16 b) {
    return MIX(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           MIX(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
INLINE f32x16 add_4(f32x16 a, f32x16 b) {
    return MIX(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           MIX(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
INLINE f32x16 add_8(f32x16 a, f32x16 b) {
    return MIX(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           MIX(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Lane i of the result is the sum of v[i].
INLINE f32x16 sums(const f32x16* v) {
    f32x16 eight[4];
    for (int i = 0; i < 4; i++)
        eight[i] = add_2(add_1(v[4 * i], v[4 * i + 1]), add_1(v[4 * i + 2], v[4 * i + 3]));
    return add_8(add_4(eight[0], eight[1]), add_4(eight[2], eight[3]));
}

INLINE float sum(f32x16 v) {
    f32x16 s = add_8(v, v);
    s = add_4(s, s);
    s = add_2(s, s);
    return s[0] + s[1];
}

INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

INLINE float max(f32x16 v) {
    v = max(v, MIX(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = max(v, MIX(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = max(v, MIX(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return v[0] > v[1] ? v[0] : v[1];
}

// ---- functions ------------------------------------------------------------------------------------

INLINE f32x16 exp_near_zero(f32x16 r) {
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// exp(x) within two units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2]. A NaN stays one.
INLINE f32x16 exp(f32x16 x) {
#ifdef PDSERVE_AVX512
    __m512 y = _mm512_max_ps((__m512)splat(-200.0f), (__m512)x);  // of -inf the next line would make a NaN
    f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)((f32x16)y * 1.44269504088896341f), 0);
    f32x16 r = (f32x16)y - n * 0.693359375f + n * 2.12194440e-4f;
    return (f32x16)_mm512_scalef_ps((__m512)exp_near_zero(r), (__m512)n);
#else
    // Below -87: zero.
    f32x16 top = splat(88.0f), bottom = splat(-87.0f);
    i32x16 alive = x > bottom;
    i32x16 nan = x != x;
    f32x16 y = max(bottom, x > top ? top : x);
    f32x16 shifted = y * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are round(y / ln 2)
    i32x16 n = (i32x16)shifted - 0x4b400000;
    f32x16 r = shifted - 12582912.0f;
    r = y - r * 0.693359375f + r * 2.12194440e-4f;
    f32x16 out = exp_near_zero(r) * (f32x16)((n + 127) << 23);
    return nan ? x : (f32x16)((i32x16)out & alive);
#endif
}

// 2^r on [-1/2, 1/2], minimax fits: within 3e-6, or within the rounding of a float where EXACT.
template <bool EXACT>
INLINE f32x16 exp2_near_zero(f32x16 r) {
    if constexpr (!EXACT) {
        f32x16 p = splat(0.0095701017f);
        p = p * r + 0.0559178603f;
        p = p * r + 0.240247448f;
        p = p * r + 0.693121815f;
        return p * r + 0.999999261f;
    }
    f32x16 p = splat(0.000153458118f);
    p = p * r + 0.00133999312f;
    p = p * r + 0.00961848896f;
    p = p * r + 0.0555032878f;
    p = p * r + 0.240226469f;
    p = p * r + 0.693147206f;
    return p * r + 1.0f;
}

// 2^x for finite x; zero far below, infinite or 2^126 far above. A NaN stays one.
template <bool EXACT>
INLINE f32x16 exp2(f32x16 x) {
#ifdef PDSERVE_AVX512
    f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, 0);
    return (f32x16)_mm512_scalef_ps((__m512)exp2_near_zero<EXACT>(x - n), (__m512)n);
#else
    f32x16 bottom = splat(-126.0f);
    i32x16 alive = x > bottom, nan = x != x;
    f32x16 top = splat(126.0f), y = max(bottom, x > top ? top : x);
    f32x16 shifted = y + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are round(y)
    f32x16 out = exp2_near_zero<EXACT>(y - (shifted - 12582912.0f)) * (f32x16)(((i32x16)shifted - 0x4b400000 + 127) << 23);
    return nan ? x : (f32x16)((i32x16)out & alive);
#endif
}

// 1 / x, where there is an instruction for it within 2^-14.
INLINE f32x16 near_reciprocal(f32x16 x) {
#ifdef PDSERVE_AVX512
    return (f32x16)_mm512_rcp14_ps((__m512)x);
#else
    return 1.0f / x;
#endif
}

INLINE f32x16 tanh(f32x16 x) {
    f32x16 e = exp(x * 2.0f);
    f32x16 far = 1.0f - 2.0f / (e + 1.0f);
    // Near zero the difference above cancels: the odd series does not.
    f32x16 s = x * x;
    f32x16 near = x + x * s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f)));
    i32x16 small = s < splat(0.04f);
    return small ? near : far;
}

// Abramowitz and Stegun 7.1.26: within 1.5e-7.
INLINE f32x16 erf(f32x16 x) {
    i32x16 negative = x < f32x16{};
    f32x16 a = negative ? -x : x;
    f32x16 t = 1.0f / (1.0f + 0.3275911f * a);
    f32x16 p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    f32x16 out = 1.0f - p * exp(-a * a);
    return negative ? -out : out;
}
