// The rows of a sequence's cache, page by page. Slots at or after its last token are never read.
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
    // f(row, number) for the next rows, LANES at most; returns how many.
    template <class F>
    INLINE int some(F f) {
        const int count = int(std::min(long(LANES), end - key));
        if (count == LANES && left >= LANES) {  // of one page
            for (int i = 0; i < LANES; i++) f(at + i * pages.slot_stride, i);
            key += LANES, left -= LANES;
            if (left) at += LANES * pages.slot_stride;
            else if (key < end) enter();
        } else {
            for (int i = 0; i < count; i++, next()) f(at, i);
        }
        return count;
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
