// The pause instruction for spin loops.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

static inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace octavo
