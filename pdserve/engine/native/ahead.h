// Memory that is fetched before its turn comes.
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
