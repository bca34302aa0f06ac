// Work shared out among threads, and the scratch memory each of them has.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>

#include "products.h"

// A thread's present task, and the one after it (-1: none).
struct Turn {
    int thread, task, next;
};

constexpr int MOST_THREADS = 256;

// body(turn) for every task in [0, count). A thread has a stretch of them to itself, in order, so that it reads weights from
// front to back; when it is done, it helps the others. It takes its next task before it does the present one, so that it
// can fetch what that will read.
template <class F>
void share(int threads, int count, F body) {
    struct alignas(64) Stretch {
        std::atomic<int> next;
        int end;
    };
    Stretch stretches[MOST_THREADS];
    threads = std::clamp(threads, 1, MOST_THREADS);
    for (int i = 0; i < threads; i++) {
        stretches[i].next = int(long(count) * i / threads);
        stretches[i].end = int(long(count) * (i + 1) / threads);
    }
    auto take = [&](int thread) {
        for (int i = 0; i < threads; i++) {
            Stretch& of = stretches[(thread + i) % threads];
            if (of.next >= of.end) continue;
            const int task = of.next++;
            if (task < of.end) return task;
        }
        return -1;
    };
    auto work = [&](int thread) {
        for (int task = take(thread); task >= 0;) {
            const int next = take(thread);
            body(Turn{thread, task, next});
            task = next;
        }
        release_tiles();
    };
    if (threads == 1 || count <= 1) return work(0);
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num());
}

constexpr int TASK_ROWS = 288;      // most rows of x in one task of a product: whole sixes, and whole tiles
#ifdef PDSERVE_TILES
constexpr int QUERY_ROWS = 384;                          // (query, head) rows in one task of attention
constexpr int BLOCK_ROWS = 32, BLOCK_KEYS = 4 * PANEL;  // of prefill attention: scores that go from product to product
#else
constexpr int QUERY_ROWS = 192;
constexpr int BLOCK_ROWS = 24, BLOCK_KEYS = 2 * PANEL;  // the same; they stay in a first cache of 32 KiB
#endif
constexpr int SPLIT_KEYS = 512;     // most keys that one task of a decode row reads

INLINE long rounded(long n, long to) { return (n + to - 1) / to * to; }

// Of a product's tile: two panels side by side, or a head.
INLINE long tile_columns(const Model& m) { return std::max(2L * PANEL, rounded(m.head_dim, PANEL)); }

INLINE int group(const Model& m) { return m.heads / m.kv_heads; }

// Queries of one attention task; at least one, however many heads share a KV head.
INLINE int task_queries(const Model& m) { return std::max(1, QUERY_ROWS / group(m)); }

// Where everything lies in a step's scratch memory: a stretch per thread, then what all threads share.
struct Scratch {
    long per_thread;                             // bytes of a thread's stretch; the first begins at 0
    long hidden, residual, activated, partial;   // byte offsets
    long split_keys, splits;                     // keys of a decode row's part, and parts of the longest
    long bytes;

    Scratch(const Model& m, int threads, long rows, long ones = 0, long longest = 0) {
        // A thread needs one of these at a time: a product's tile and widened panel; or what attention lays out.
        long inputs = std::max({m.width, m.ffn, m.heads * m.head_dim});
        long product = TASK_ROWS * tile_columns(m) + wide_floats<float>(inputs);
        long wide = rounded(m.head_dim, PANEL), queries = long(task_queries(m)) * group(m);
        long prefill = queries * (m.head_dim + wide + 2) + 2 * BLOCK_ROWS * BLOCK_KEYS + BLOCK_KEYS / PANEL * panel_floats<float>(m.head_dim) + BLOCK_KEYS * wide;  // PrefillRoom
        long decode = group(m) * (SPLIT_KEYS + LANES + wide + 2);
        per_thread = rounded(std::max({product, prefill, decode}) * 4 + 4096, 4096);

        long at = per_thread * threads;
        auto take = [&](long floats) {
            long mine = at;
            at += rounded(floats * 4, 64);
            return mine;
        };
        hidden = take(rows * inputs);
        residual = take(rows * m.width);
        activated = take(rows * m.ffn);
        // Few rows are cut finer, so that every thread finds work.
        long wanted = threads == 1 || ones == 0 ? 1 : (4L * threads + ones * m.kv_heads - 1) / (ones * m.kv_heads);
        split_keys = std::clamp(rounded((longest + wanted - 1) / wanted, LANES), 128L, long(SPLIT_KEYS));
        splits = std::max(1L, (longest + split_keys - 1) / split_keys);
        partial = take(ones * m.heads * splits * (m.head_dim + 2));
        bytes = at;
    }
};

// Cuts one thread's stretch into pieces.
struct Cutter {
    char* at;
    template <class T>
    T* take(long count) {
        T* mine = (T*)at;
        at += rounded(count * long(sizeof(T)), 64);
        return mine;
    }
};
