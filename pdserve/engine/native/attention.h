// Attention straight over the cache pages: no gather, no padding, each sequence reads its own keys.
//
//   decode    one query of a sequence. The query heads that share a KV head read each key once; long sequences are cut
//             into stretches of SPLIT_KEYS for several threads, and put together at the end.
//   prefill   many queries of a sequence, with a running softmax over blocks of KEYS keys, turned into panels once per
//             task. Keys that no query of the task sees are skipped.
//
// Slots at or after a sequence's last token are never read.
#pragma once

#include "tasks.h"

// One sequence's keys or values of one KV head.
template <class KV>
struct Pages {
    const KV* base;
    const int32_t* table;
    int page_size;
    long slot_stride;

    INLINE const KV* row(long key) const {
        long slot = long(table[key / page_size]) * page_size + key % page_size;
        return base + slot * slot_stride;
    }
};

// The rows of successive keys: a step costs an addition, not a division.
template <class KV>
struct Walk {
    const KV* at;
    Walk(const Pages<KV>& pages, long first, long end) : at(nullptr), pages(pages), key(first), end(end) {
        if (key < end) enter();
    }
    INLINE bool done() const { return key >= end; }
    INLINE void next() {
        key++;
        if (--left) at += pages.slot_stride;
        else if (key < end) enter();
    }

  private:
    const Pages<KV>& pages;
    long key, end, left = 0;
    INLINE void enter() {
        at = pages.row(key);
        left = pages.page_size - key % pages.page_size;
    }
};

template <class KV>
INLINE Pages<KV> pages_of(const Model& m, const Step& s, const void* plane, int sequence, int head) {
    return {(const KV*)plane + head * m.head_stride, s.tables + s.table_at[sequence], m.page_size, m.slot_stride};
}

INLINE f32x16 capped(f32x16 score, float cap) { return cap == 0 ? score : tanh(score / cap) * cap; }

constexpr int AHEAD_KEYS = 2 * LANES;  // how far the decode loops fetch ahead

template <class T>
INLINE void prefetch_row(const T* row, int width) {
    for (long at = 0; at < long(width * sizeof(T)); at += 64) __builtin_prefetch((const char*)row + at, 0, 2);
}

// The first rows of a walk, which nobody has fetched ahead.
template <class KV>
INLINE void prefetch_rows(const Pages<KV>& pages, long first, long end, int width) {
    Walk<KV> walk(pages, first, std::min(end, first + AHEAD_KEYS));
    for (; !walk.done(); walk.next()) prefetch_row(walk.at, width);
}

// ---- decode ----------------------------------------------------------------------------------------

// scores[r][key - first] = scaled, capped q[r] . key, for the `rows` queries of a group; ld from row to row.
template <class X, class KV>
void decode_scores(const Model& m, const X* q, int rows, const Pages<KV>& keys, long first, long end, float* scores, long ld) {
    typedef Dot<X, KV> D;
    const int d = m.head_dim;
    Walk<KV> walk(keys, first, end), ahead(keys, first + AHEAD_KEYS, end);
    for (long key = first; key < end; key += LANES) {
        const KV* row[LANES];
        for (int i = 0; i < LANES; i++) {
            row[i] = walk.done() ? row[0] : walk.at;
            if (!walk.done()) walk.next();
            if (!ahead.done()) prefetch_row(ahead.at, d), ahead.next();
        }
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

// In place: exp(score - best); returns the sum. best: the largest score.
INLINE float softmax_parts(float* scores, int count, float& best) {
    f32x16 top = splat(-INFINITY), total = {};
    by_lanes(count, [&](int i, int n) {
        for (int j = n; j < LANES; j++) scores[i + j] = -INFINITY;
        top = max(top, load(scores + i));
    });
    best = max(top);
    by_lanes(count, [&](int i, int) {
        f32x16 weight = exp(load(scores + i) - best);
        store(scores + i, weight);
        total += weight;
    });
    return sum(total);
}

// out[r] = sum over keys of weights[r][key] * value, for R rows and V vectors of columns; `some` (1 to 16) columns of the
// last vector exist.
template <class KV, int R, int V>
void decode_values(const Pages<KV>& values, long first, long end, const float* weights, long ld, int some, float* out, long ldo) {
    f32x16 sum[R][V] = {};
    Walk<KV> walk(values, first, end), ahead(values, first + AHEAD_KEYS, end);
    for (long key = 0; key < end - first; key++, walk.next()) {
        if (!ahead.done()) prefetch_row(ahead.at, V * LANES), ahead.next();
        f32x16 part[V];
        for (int v = 0; v < V; v++) part[v] = v + 1 < V || some == LANES ? load(walk.at + v * LANES) : load_some(walk.at + v * LANES, some);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] += weights[r * ld + key] * part[v];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * ldo + v * LANES, sum[r][v], v + 1 < V ? LANES : some);
}

// One stretch of one sequence's keys: out [group, d] not yet divided by total [group]; best [group].
template <class X, class KV>
void decode_part(const Model& m, const X* q, Pages<KV> keys, Pages<KV> values, long first, long end, float* out, long ldo, float* best,
                 float* total, float* scores) {
    const int rows = group(m);
    const long ld = SPLIT_KEYS + LANES;
    prefetch_rows(values, first, end, m.head_dim);
    decode_scores<X, KV>(m, q, rows, keys, first, end, scores, ld);
    for (int r = 0; r < rows; r++) total[r] = softmax_parts(scores + r * ld, int(end - first), best[r]);
    for (int column = 0; column < m.head_dim;) {
        const bool four = m.head_dim - column >= 4 * LANES;
        const int some = std::min(LANES, m.head_dim - column - (four ? 3 * LANES : 0));
        Pages<KV> from = values;
        from.base += column;
        for (int r = 0; r < rows;) {
            const float* weights = scores + r * ld;
            float* to = out + r * ldo + column;
            const int height = rows - r >= 4 ? 4 : rows - r >= 3 ? 3 : 1;
            if (four && height == 4) decode_values<KV, 4, 4>(from, first, end, weights, ld, some, to, ldo);
            else if (four && height == 3) decode_values<KV, 3, 4>(from, first, end, weights, ld, some, to, ldo);
            else if (four) decode_values<KV, 1, 4>(from, first, end, weights, ld, some, to, ldo);
            else if (height == 4) decode_values<KV, 4, 1>(from, first, end, weights, ld, some, to, ldo);
            else if (height == 3) decode_values<KV, 3, 1>(from, first, end, weights, ld, some, to, ldo);
            else decode_values<KV, 1, 1>(from, first, end, weights, ld, some, to, ldo);
            r += height;
        }
        column += four ? 4 * LANES : LANES;
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

// ---- prefill ---------------------------------------------------------------------------------------

// What one task of prefill works in; rows are (query, head of the group) pairs.
template <class X>
struct PrefillRoom {
    static constexpr int KEYS = 2 * PANEL;  // of a block
    static constexpr int STEP = 24;  // rows whose scores stay in the first cache from product to product
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
    f32x16 top = splat(best);
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < vectors; i++) {
        f32x16 v = load(scores + i * LANES);
        const bool edge = low > i * LANES || high < (i + 1) * LANES;
        if (m.soft_cap != 0) v = capped(v * m.scale, m.soft_cap);
        if (edge) {
            i32x16 key = lanes + i * LANES;
            v = (key >= low) & (key < high) ? v : splat(UNSEEN);
        }
        if (edge || m.soft_cap != 0) store(scores + i * LANES, v);
        top = max(top, v);
    }
    const float now = max(top), shift = now * unit;
    if (now == UNSEEN) {  // nothing seen yet
        std::memset(weights, 0, vectors * LANES * sizeof(X));
        return;
    }
    f32x16 sums_of = {};
    for (int i = 0; i < vectors; i++) {
        f32x16 weight = exp2<EXACT>(load(scores + i * LANES) * unit - shift);
        store(weights + i * LANES, weight);
        sums_of += weight;
    }
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

// ---- both ------------------------------------------------------------------------------------------

// out [rows, heads, d] = attention of q [rows, heads, d] over the pages.
template <class X, class KV>
void attend(const Model& m, const Layer& l, const Step& s, const X* q, X* out) {
    long longest = 0;
    int prefill_tasks = 0, queries = task_queries(m), ones = 0;
    for (int i = 0; i < s.sequences; i++) {
        int rows = s.first_row[i + 1] - s.first_row[i];
        if (rows > 1) prefill_tasks += (rows + queries - 1) / queries * m.kv_heads;
        else ones++, longest = std::max(longest, long(s.places[s.first_row[i]]) + 1);
    }
    const Scratch room(m, s.threads, s.rows, ones, longest);
    auto own = [&](int thread) { return s.scratch + thread * room.per_thread; };
    const int heads = group(m), d = m.head_dim;
    const long splits = room.splits, part = d + 2;
    float* parts = (float*)(s.scratch + room.partial);  // [one-token row from the end, head, split, best | total | out]

    share(s.threads, prefill_tasks, [&](Turn turn) {
        int left = turn.task / m.kv_heads, sequence = 0, blocks;
        for (;; sequence++) {
            int rows = s.first_row[sequence + 1] - s.first_row[sequence];
            blocks = rows > 1 ? (rows + queries - 1) / queries : 0;
            if (left < blocks) break;
            left -= blocks;
        }
        int end = s.first_row[sequence + 1] - left * queries;  // the last queries, which see most, first
        int first = std::max(s.first_row[sequence], end - queries);
        prefill_part<X, KV>(m, l, s, sequence, turn.task % m.kv_heads, first, end, q, out, own(turn.thread));
    });

    // One-token sequences come last, shortest first: the longest begin.
    struct Part {
        int sequence, head;
        long row, split, begin, end, first, last;
    };
    auto part_of = [&](int task) {
        Part p;
        p.sequence = s.sequences - 1 - int(task / (m.kv_heads * splits));
        p.head = int(task / splits % m.kv_heads);
        p.split = task % splits;
        p.row = s.first_row[p.sequence];
        p.end = s.places[p.row] + 1;
        p.begin = l.window ? std::max(0L, p.end - long(l.window)) : 0;
        p.first = p.begin + p.split * room.split_keys;
        p.last = std::min(p.end, p.first + room.split_keys);
        return p;
    };
    share(s.threads, int(ones * m.kv_heads * splits), [&](Turn turn) {
        const Part p = part_of(turn.task);
        if (p.first >= p.last) return;
        Cutter cut{own(turn.thread)};
        float* best = cut.take<float>(heads);
        float* total = cut.take<float>(heads);
        float* sums_of = cut.take<float>(heads * d);
        float* scores = cut.take<float>(heads * (SPLIT_KEYS + LANES));
        if (turn.next >= 0) {
            const Part after = part_of(turn.next);
            prefetch_rows(pages_of<KV>(m, s, l.k_pages, after.sequence, after.head), after.first, after.last, d);
        }
        decode_part<X, KV>(m, q + (p.row * m.heads + p.head * heads) * d, pages_of<KV>(m, s, l.k_pages, p.sequence, p.head),
                           pages_of<KV>(m, s, l.v_pages, p.sequence, p.head), p.first, p.last, sums_of, d, best, total, scores);
        for (int r = 0; r < heads; r++) {
            long head = p.head * heads + r;
            if (p.end - p.begin <= room.split_keys) {
                X* to = out + (p.row * m.heads + head) * d;
                by_lanes(d, [&](int i, int n) { store(to + i, load(sums_of + r * d + i, n) / total[r], n); });
                continue;
            }
            float* mine = parts + (((s.rows - 1 - p.row) * m.heads + head) * splits + p.split) * part;
            mine[0] = best[r];
            mine[1] = total[r];
            std::memcpy(mine + 2, sums_of + r * d, d * sizeof(float));
        }
    });
    if (splits == 1) return;
    share(s.threads, ones, [&](Turn turn) {
        long row = s.first_row[s.sequences - 1 - turn.task], end = s.places[row] + 1;
        long keys = l.window ? std::min(end, long(l.window)) : end;
        if (keys <= room.split_keys) return;
        for (int head = 0; head < m.heads; head++) {
            const float* mine = parts + ((s.rows - 1 - row) * m.heads + head) * splits * part;
            decode_join<X>(m, mine, (keys + room.split_keys - 1) / room.split_keys, out + (row * m.heads + head) * d);
        }
    });
}
