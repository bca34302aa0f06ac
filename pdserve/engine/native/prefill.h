// Attention of many queries of a sequence, with a running softmax over blocks of KEYS keys, turned into panels once per task.
// Keys that no query of the task sees are skipped.
#pragma once

#include "pages.h"

// What one task of prefill works in; rows are (query, head of the group) pairs.
template <class X>
struct PrefillRoom {
    static constexpr int KEYS = BLOCK_KEYS, STEP = BLOCK_ROWS;
    X* q;                            // [rows, d]
    float *out, *best, *total;       // [rows, wide], [rows], [rows]
    float* scores;                   // [STEP, KEYS]
    X* weights;                      // [STEP, KEYS]
    float *keys, *values;            // panels of 64 keys; of all keys for 64 columns

    PrefillRoom(const Model& m, char* scratch) {
        long rows = long(task_queries(m)) * group(m), wide = rounded(m.head_dim, PANEL);
        Cutter cut{scratch};
        q = cut.take<X>(rows * m.head_dim);
        out = cut.take<float>(rows * wide);
        best = cut.take<float>(rows);
        total = cut.take<float>(rows);
        scores = cut.take<float>(STEP * KEYS);
        weights = cut.take<X>(STEP * KEYS);
        keys = cut.take<float>(KEYS / PANEL * panel_floats<X>(m.head_dim));
        values = cut.take<float>(KEYS * wide);
    }
};

// Values row[0] to row[count - 1] as panels [KEYS, 64] per 64 columns, one after the other; zeros up to whole vectors of keys.
template <class X, class KV>
void pack_values(const Model& m, const KV* const* row, int count, float* panel) {
    constexpr int PAIR = Cell<X>::INPUTS;
    for (int column = 0; column < m.head_dim; column += PANEL, panel += PrefillRoom<X>::KEYS / PAIR * PANEL) {
        int width = std::min(PANEL, m.head_dim - column);
        for (int key = 0; key < rounded(count, LANES); key += PAIR) {
            float* to = panel + key / PAIR * PANEL;
            const KV* a = key < count ? row[key] + column : nullptr;
            const KV* b = PAIR == 2 && key + 1 < count ? row[key + 1] + column : nullptr;
            for (int i = 0; i < PANEL; i += LANES) {
                bool some = a != nullptr && i < width;
                store(to + i, some ? Cell<X>::of_columns(a + i, b ? b + i : nullptr, std::min(LANES, width - i)) : f32x16{});
            }
        }
    }
}

constexpr float UNSEEN = -1e30f;  // the score of a key that a query may not see: its weight is zero, and no sum a NaN
constexpr float LOG2_E = 1.44269504088896341f;

// Scores of one block of keys to weights, and what was summed before to the new scale. The row's keys of this block are
// [low, high); weights are written for `vectors` times sixteen. A weight that becomes a bf16 needs no exact exponential.
template <class X>
INLINE void prefill_softmax(const Model& m, float* scores, int vectors, int low, int high, float& best, float& total, float* out, long wide,
                            X* weights) {
    constexpr bool EXACT = sizeof(X) > 2;
    const float unit = m.soft_cap == 0 ? m.scale * LOG2_E : LOG2_E;  // a score's, as an exponent of two
    const bool capping = m.soft_cap != 0;
    f32x16 top = splat(best);
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int plain = low > 0 || capping ? 0 : std::min(vectors, high / LANES);  // vectors whose keys are all seen
    f32x16 other = top;
    for (int i = 0; i + 1 < plain; i += 2) {
        top = max(top, load(scores + i * LANES));
        other = max(other, load(scores + (i + 1) * LANES));
    }
    top = max(top, other);
    for (int i = plain / 2 * 2; i < vectors; i++) {
        f32x16 v = load(scores + i * LANES);
        const bool edge = low > i * LANES || high < (i + 1) * LANES;
        if (capping) v = capped(v * m.scale, m.soft_cap);
        if (edge) {
            i32x16 key = lanes + i * LANES;
            v = (key >= low) & (key < high) ? v : splat(UNSEEN);
        }
        if (edge || capping) store(scores + i * LANES, v);
        top = max(top, v);
    }
    const float now = max(top), shift = now * unit;
    if (now == UNSEEN) {  // nothing seen yet
        std::memset(weights, 0, vectors * LANES * sizeof(X));
        return;
    }
    f32x16 sums_of = {};
    f32x16 more_sums = {};
    auto weigh = [&](int i, f32x16& to) {
        f32x16 weight = exp2<EXACT>(load(scores + i * LANES) * unit - shift);
        store(weights + i * LANES, weight);
        to += weight;
    };
    for (int i = 0; i + 1 < vectors; i += 2) weigh(i, sums_of), weigh(i + 1, more_sums);
    if (vectors % 2) weigh(vectors - 1, sums_of);
    sums_of += more_sums;
    if (now != best) {
        float keep = best == UNSEEN ? 0.0f : std::exp2(best * unit - shift);
        for (long i = 0; i < wide; i += LANES) store(out + i, load(out + i) * keep);
        total *= keep;
        best = now;
    }
    total += sum(sums_of);
}

// The queries [first, end) (rows of the step) of one sequence, for one KV head.
template <class X, class KV>
void prefill_part(const Model& m, const Layer& l, const Step& s, int sequence, int head, int first, int end, const X* q, X* out, char* scratch) {
    PrefillRoom<X> room(m, scratch);
    const int d = m.head_dim, heads = group(m), rows = (end - first) * heads;
    const long wide = rounded(d, PANEL);
    auto at = [&](const X* base, int row) { return base + (long(first + row / heads) * m.heads + head * heads + row % heads) * d; };
    for (int row = 0; row < rows; row++) {
        std::memcpy(room.q + long(row) * d, at(q, row), d * sizeof(X));
        room.best[row] = UNSEEN;
        room.total[row] = 0;
    }
    std::memset(room.out, 0, rows * wide * sizeof(float));
    Pages<KV> keys = pages_of<KV>(m, s, l.k_pages, sequence, head), values = pages_of<KV>(m, s, l.v_pages, sequence, head);
    auto begin_of = [&](int token) { return l.window ? std::max(int64_t(0), s.places[token] + 1 - l.window) : int64_t(0); };
    long begin = begin_of(first), limit = s.places[end - 1] + 1;
    Walk<KV> key_walk(keys, begin, limit), value_walk(values, begin, limit);
    constexpr int KEYS = PrefillRoom<X>::KEYS;
    const long key_panel = panel_floats<X>(d), value_panel = KEYS / Cell<X>::INPUTS * PANEL;
    for (long key = begin; key < limit; key += KEYS) {
        const int count = int(std::min(long(KEYS), limit - key));
        const KV *key_row[KEYS], *value_row[KEYS];
        for (int i = 0; i < count; i++, key_walk.next(), value_walk.next())
            key_row[i] = key_walk.at, value_row[i] = value_walk.at;
        for (int i = 0; i < count; i += PANEL)
            pack<X>([&](int n) { return key_row[i + n]; }, std::min(PANEL, count - i), d, room.keys + i / PANEL * key_panel);
        pack_values<X, KV>(m, value_row, count, room.values);
        int skip = 0;  // queries that see nothing of this block: those before it
        while (s.places[first + skip] < key) skip++;
        for (int from = skip * heads; from < rows; from += PrefillRoom<X>::STEP) {
            const int some = std::min(PrefillRoom<X>::STEP, rows - from);
            const int last = first + (from + some - 1) / heads;  // of these queries: it sees most
            const int seen = int(std::min(long(s.places[last]) + 1 - key, long(count))), whole = int(rounded(seen, LANES));
            for (int i = 0; i < seen; i += PANEL)
                times_panel<X, float>(room.q + long(from) * d, d, some, d, room.keys + i / PANEL * key_panel, PANEL, std::min(PANEL, seen - i),
                                      room.scores + i, KEYS, true);
            for (int row = from; row < from + some; row++) {
                int token = first + row / heads;
                int low = int(std::clamp(long(begin_of(token)) - key, 0L, long(KEYS)));
                int high = int(std::min(long(s.places[token]) + 1 - key, long(count)));
                prefill_softmax<X>(m, room.scores + (row - from) * KEYS, whole / LANES, low, high, room.best[row], room.total[row],
                                   room.out + row * wide, wide, room.weights + (row - from) * KEYS);
            }
            for (int column = 0; column < d; column += PANEL)
                times_panel<X, float>(room.weights, KEYS, some, whole, room.values + column / PANEL * value_panel, PANEL,
                                      std::min(PANEL, d - column), room.out + from * wide + column, wide, false);
        }
    }
    for (int row = 0; row < rows; row++) {
        X* to = (X*)at(out, row);
        by_lanes(d, [&](int i, int n) { store(to + i, load(room.out + row * wide + i) / room.total[row], n); });
    }
}
