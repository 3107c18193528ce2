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
#define BLOOMERY_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

#define BLOOMERY_API extern "C" __attribute__((visibility("default")))

// Raised by one with each change of a signature; bloomery/native.py refuses a library of another version.
#define BLOOMERY_ABI_VERSION 2

BLOOMERY_API int32_t bloomery_abi_version(void);

// --- order.cpp: the `bloomery` order of samples (bloomery/data/permutation.py, quotas.py, order.py)

// out[i] = where the permutation of range(n), 1 <= n <= 2^62, with keys[i] (or keys[0], if key_count is 1)
// sends index[i].
BLOOMERY_API int32_t bloomery_permute(const int64_t* index, int64_t count, int64_t n, const uint64_t* keys,
                                      int64_t key_count, int64_t* out);

// Walks `blocks` blocks of a mixture of n datasets, in place. Each block gives `chairs` extra samples, at most
// one to a dataset; dataset i is due steps[i] / 2^46 of one in each. whole + residue / 2^46: extras due so far;
// whole + ahead: extras given. -1: the state is not one that such walks reach.
BLOOMERY_API int32_t bloomery_walk_quotas(int64_t n, const int64_t* steps, int64_t chairs, int64_t blocks,
                                          int64_t* whole, int64_t* residue, int64_t* ahead);

// A block of `size` samples, `size` a power of two: quotas[i] samples of dataset i, numbered from first_turns[i]
// on, in the places of the permutation of range(size) with `key`.
BLOOMERY_API int32_t bloomery_mix_block(int64_t n, const int64_t* quotas, const int64_t* first_turns, int64_t size,
                                        uint64_t key, int32_t* datasets, int64_t* turns);

// out[i] = the window that dataset datasets[i], of n with windows[..] each, gives as its turns[i]-th sample. Keys
// are derived from (seed, purpose, dataset, epoch).
BLOOMERY_API int32_t bloomery_windows(int64_t n, const int64_t* windows, uint64_t seed, uint64_t purpose,
                                      const int64_t* datasets, const int64_t* turns, int64_t count, int64_t* out);

// --- megatron.cpp: Megatron's order of samples (bloomery/data/megatron.py)

// Shuffles as numpy's RandomState does, going on from its state: the 624 words of MT19937 and the place in them.
BLOOMERY_API int32_t bloomery_shuffle(uint32_t* state, int32_t* place, uint32_t* values, int64_t count);

// ends[i] = sum of lengths[order[0..i]].
BLOOMERY_API int32_t bloomery_cumulate(const void* lengths, const uint32_t* order, int64_t count, int64_t* ends);

// For sample s = first, first + 1, ...: the first dataset with the largest weights[i] * max(s, 1) - counts[i].
BLOOMERY_API int32_t bloomery_blend(int64_t n, const double* weights, int64_t first, int64_t count, int64_t* counts,
                                    uint16_t* datasets);
