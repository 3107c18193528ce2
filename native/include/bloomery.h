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
#define BLOOMERY_ABI_VERSION 3

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

// --- gather.cpp: samples from token files (bloomery/data/reading.py)

// Reads `rows` samples of length + 1 tokens from mapped tokens of a type (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16).
// Sample r begins at token starts[r] and fills row places[r] of inputs and targets, each [.., length]; the largest
// id, taken as unsigned, goes to largest[places[r]]. Pages are asked for `ahead` samples before they are read; 0
// asks for none. -1: no such type.
BLOOMERY_API int32_t bloomery_gather(const void* tokens, int32_t type, int64_t rows, const int64_t* starts,
                                     const int64_t* places, int64_t length, int64_t ahead, int64_t* inputs,
                                     int64_t* targets, uint64_t* largest);

// The same from documents laid end to end in another order: document order[k] ends at token ends[k] of that row,
// and begins at byte pointers[order[k]] (unaligned) of the file. starts count in the row. -2: a sample leaves it.
BLOOMERY_API int32_t bloomery_gather_documents(const void* tokens, int32_t type, int64_t rows, const int64_t* starts,
                                               const int64_t* places, int64_t length, int64_t ahead,
                                               const void* pointers, const uint32_t* order, const int64_t* ends,
                                               int64_t count, int64_t* inputs, int64_t* targets, uint64_t* largest);
