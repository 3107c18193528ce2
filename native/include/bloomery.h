// The C ABI between bloomery and its native part: no Python, no torch, nothing thrown across it.
//
// Functions return 0, or a negative error number whose meaning stands with each. Memory belongs to the caller
// unless a function says otherwise.
#pragma once

#include <stdint.h>

#if defined(__clang__) || !defined(__GNUC__) || !defined(__x86_64__) || defined(BLOOMERY_NO_CLONES)
#define BLOOMERY_CLONES
#else
// One function for every processor, the best variant chosen when the library is loaded: never -march=native.
// Sanitizers define BLOOMERY_NO_CLONES, since their runtimes are not up yet when variants are chosen.
#define BLOOMERY_CLONES __attribute__((target_clones("avx512f,avx512bw", "avx2", "default")))
#endif

#define BLOOMERY_API extern "C" __attribute__((visibility("default")))

// Raised by one with each change of a signature; bloomery/native.py refuses a library of another version.
#define BLOOMERY_ABI_VERSION 1

BLOOMERY_API int32_t bloomery_abi_version(void);
