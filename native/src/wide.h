// AVX-512 written by hand where the compiler's vectors do not reach the speed of memory. It is chosen at each call, on
// processors with AVX-512BW (Skylake-SP, Zen 4 and later), and writes the same bytes as the portable code.
#pragma once

#include <cstdint>

#include "quantise.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define BLOOMERY_WIDE __attribute__((target("avx512f,avx512bw")))

namespace bloomery {

inline bool has_wide() {
    static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    return has;
}

// As in quantise.h, for int8 alone.
namespace wide {
bool combine(const Hop& hop, int64_t count);
bool decode(const uint8_t* encoded, int64_t count, float* out);
bool accumulate(const uint8_t* encoded, int64_t count, float* sum);
}  // namespace wide

}  // namespace bloomery
#endif
