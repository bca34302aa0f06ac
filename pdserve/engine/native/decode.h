// Attention of one query of a sequence. The query heads that share a KV head read each key once; long sequences are cut into
// stretches of SPLIT_KEYS for several threads, and put together at the end.
#pragma once

#include "pages.h"

// scores[r][key - first] = scaled, capped q[r] . key, for the `rows` queries of a group; ld from row to row.
template <class X, class KV>
void decode_scores(const Model& m, const X* q, int rows, const Pages<KV>& keys, long first, long end, float* scores, long ld) {
    typedef Dot<X, KV> D;
    const int d = m.head_dim;
    Walk<KV> walk(keys, first, end), ahead(keys, first + AHEAD_KEYS, end);
    for (long key = first; key < end; key += LANES) {
        const KV* row[LANES];
        const int count = walk.some([&](const KV* at, int i) { row[i] = at; });
        for (int i = count; i < LANES; i++) row[i] = row[0];
        ahead.some([&](const KV* at, int) { prefetch_row(at, d); });
        for (int r = 0; r < rows; r++) {
            const X* query = q + long(r) * d;
            f32x16 sum[LANES] = {};
            int k = 0;
            for (; k + D::STEP <= d; k += D::STEP) {
                typename D::Part part = D::x(query + k);
                for (int i = 0; i < LANES; i++) sum[i] = D::add(sum[i], part, D::w(row[i] + k));
            }
            for (; k < d; k += LANES) {
                int count = std::min(LANES, d - k);
                f32x16 part = load(query + k, count);
                for (int i = 0; i < LANES; i++) sum[i] += part * load(row[i] + k, count);
            }
            store(scores + r * ld + (key - first), capped(sums(sum) * m.scale, m.soft_cap));
        }
    }
}

// In place: exp(score - best), as W, which takes no more room; returns the sum. best: the largest score.
template <class W>
INLINE float softmax_parts(float* scores, int count, float& best) {
    f32x16 top = splat(-INFINITY), total = {};
    by_lanes(count, [&](int i, int n) {
        for (int j = n; j < LANES; j++) scores[i + j] = -INFINITY;
        top = max(top, load(scores + i));
    });
    best = max(top);
    by_lanes(count, [&](int i, int) {
        f32x16 weight = exp(load(scores + i) - best);
        store((W*)scores + i, weight);
        total += weight;
    });
    return sum(total);
}

// out[r] = sum over keys of weights[r][key] * value, for R rows and V vectors of columns; `some` (1 to 16) columns of the
// last vector exist.
template <int R, int V, class KV, class W>
void decode_values(const Pages<KV>& values, long first, long end, const W* weights, long ld, int some, float* out, long ldo) {
    f32x16 sum[R][V] = {};
    Walk<KV> walk(values, first, end), ahead(values, first + AHEAD_KEYS, end);
    for (long key = 0; key < end - first;) {
        ahead.some([&](const KV* at, int) { prefetch_row(at, V * LANES); });
        key += walk.some([&](const KV* at, int i) {
            f32x16 part[V];
            for (int v = 0; v < V; v++) part[v] = v + 1 < V || some == LANES ? load(at + v * LANES) : load_some(at + v * LANES, some);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) sum[r][v] += to_float(weights[r * ld + key + i]) * part[v];
        });
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * ldo + v * LANES, sum[r][v], v + 1 < V ? LANES : some);
}

// Whether the values of two keys are multiplied by one instruction.
#ifdef PDSERVE_BF16_DOT
template <class X, class KV>
constexpr bool in_pairs = std::is_same_v<X, bf16> && std::is_same_v<KV, bf16>;

// The same for 64 columns in bf16, two keys at a time: weights [rows, ld] are rounded, too. Values of two keys are interleaved
// within each 128 bits, so sums lie in that order until they are stored.
template <int R>
void decode_pairs(const Pages<bf16>& values, long first, long end, const bf16* weights, long ld, float* out, long ldo) {
    __m512 sum[R][4] = {};
    Walk<bf16> walk(values, first, end), ahead(values, first + AHEAD_KEYS, end);
    for (long key = 0; key < end - first; key += LANES) {
        const bf16* row[LANES];
        const int count = walk.some([&](const bf16* at, int i) { row[i] = at; });
        ahead.some([&](const bf16* at, int) { prefetch_row(at, PANEL); });
        for (int i = 0; i < count; i += 2) {
            __m512bh part[4];
            for (int half = 0; half < 2; half++) {
                const int at = half * 2 * LANES;
                __m512i even = _mm512_loadu_si512(row[i] + at), odd = i + 1 < count ? _mm512_loadu_si512(row[i + 1] + at) : __m512i{};
                part[2 * half] = (__m512bh)_mm512_unpacklo_epi16(even, odd);
                part[2 * half + 1] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
            }
            for (int r = 0; r < R; r++) {
                int32_t pair;
                std::memcpy(&pair, weights + r * ld + key + i, sizeof pair);
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
                for (int v = 0; v < 4; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], weight, part[v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            f32x16 low = (f32x16)sum[r][2 * half], high = (f32x16)sum[r][2 * half + 1];
            float* to = out + r * ldo + half * 2 * LANES;
            store(to, MIX(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
            store(to + LANES, MIX(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
        }
}
#else
template <class X, class KV>
constexpr bool in_pairs = false;
template <int R, class... T>
void decode_pairs(T...) {}
#endif

// One stretch of one sequence's keys: out [group, d] not yet divided by total [group]; best [group].
template <class X, class KV>
void decode_part(const Model& m, const X* q, Pages<KV> keys, Pages<KV> values, long first, long end, float* out, long ldo, float* best,
                 float* total, float* scores) {
    constexpr bool PAIRS = in_pairs<X, KV>;
    typedef std::conditional_t<PAIRS, bf16, float> W;
    const int rows = group(m);
    const long ld = SPLIT_KEYS + LANES, ldw = ld * sizeof(float) / sizeof(W);
    prefetch_rows(values, first, end, m.head_dim);
    decode_scores<X, KV>(m, q, rows, keys, first, end, scores, ld);
    for (int r = 0; r < rows; r++) total[r] = softmax_parts<W>(scores + r * ld, int(end - first), best[r]);
    for (int column = 0; column < m.head_dim;) {
        const int left = m.head_dim - column, columns = left >= PANEL ? PANEL : std::min(LANES, left);
        Pages<KV> from = values;
        from.base += column;
        for (int r = 0; r < rows; r += 4)
            with_constant<4>(std::min(4, rows - r), [&](auto height) {
                constexpr int R = decltype(height)::value;
                const W* weights = (const W*)scores + r * ldw;
                float* to = out + r * ldo + column;
                if (columns < PANEL) decode_values<R, 1>(from, first, end, weights, ldw, columns, to, ldo);
                else if constexpr (PAIRS) decode_pairs<R>(from, first, end, weights, ldw, to, ldo);
                else decode_values<R, 4>(from, first, end, weights, ldw, LANES, to, ldo);
            });
        column += columns;
    }
}

// A decode row's result from its parts: each weighs exp(its best score - the best of all) * its total.
template <class X>
void decode_join(const Model& m, const float* parts, long count, X* out) {
    const int d = m.head_dim;
    float best = -INFINITY, total = 0;
    for (long p = 0; p < count; p++) best = std::max(best, parts[p * (d + 2)]);
    for (long p = 0; p < count; p++) total += std::exp(parts[p * (d + 2)] - best) * parts[p * (d + 2) + 1];
    by_lanes(d, [&](int i, int n) {
        f32x16 sum = {};
        for (long p = 0; p < count; p++) sum += load(parts + p * (d + 2) + 2 + i, n) * std::exp(parts[p * (d + 2)] - best);
        store(out + i, sum / total, n);
    });
}
