// Attention straight over the cache pages: no gather, no padding, each sequence reads its own keys. Shared out among threads:
// a part of a sequence of one query (decode.h), or some queries of one of many (prefill.h), for one KV head.
#pragma once

#include "decode.h"
#include "prefill.h"

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
