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
#if __GNUC__ >= 12
#define BLOOMERY_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define BLOOMERY_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif

#define BLOOMERY_API extern "C" __attribute__((visibility("default")))

// Raised by one with each change of a signature, not for new functions, which Python can do without;
// bloomery/native.py refuses a library of another version.
#define BLOOMERY_ABI_VERSION 9

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

// --- fair.cpp: mixtures that are fair at every sample (bloomery/data/fair_quotas.py)

// Moves counts, of n datasets, from stream index `begin` on by `blocks` blocks of `size` samples. shares[i] / one is
// dataset i's share; they sum to one <= 2^61. -1: the counts are not ones that such moves reach.
BLOOMERY_API int32_t bloomery_fair_counts(int64_t n, const int64_t* shares, int64_t one, int64_t begin, int64_t size,
                                          int64_t blocks, int64_t* counts);

// The `size` <= 2^30 samples from stream index `begin` on, between whose ends the datasets' counts are given: the
// dataset of each, and which of its samples it is. -1: no fair schedule has these counts.
BLOOMERY_API int32_t bloomery_fair_block(int64_t n, const int64_t* shares, int64_t one, int64_t begin, int64_t size,
                                         const int64_t* counts, const int64_t* counts_after, int32_t* datasets,
                                         int64_t* turns);

// --- megatron.cpp: Megatron's order of samples (bloomery/data/megatron.py)

// Shuffles as numpy's RandomState does, going on from its state: the 624 words of MT19937 and the place in them.
BLOOMERY_API int32_t bloomery_shuffle(uint32_t* state, int32_t* place, uint32_t* values, int64_t count);

// ends[i] = sum of lengths[order[0..i]].
BLOOMERY_API int32_t bloomery_cumulate(const void* lengths, const uint32_t* order, int64_t count, int64_t* ends);

// For sample s = first, first + 1, ...: the first dataset with the largest weights[i] * max(s, 1) - counts[i].
BLOOMERY_API int32_t bloomery_blend(int64_t n, const double* weights, int64_t first, int64_t count, int64_t* counts,
                                    uint16_t* datasets);

// --- pages.cpp: sums of pages of 4 KiB (bloomery/data/page_sums.py, page_check.py)

// A mapped file and what was written into it. Threads may share one.
typedef struct {
    const void* content;   // where byte 0 of the file lies
    int64_t bytes;         // of the file
    const uint32_t* sums;  // of each page
    uint64_t* checked;     // a bit of each page, set once the page was found to be what was written
} bloomery_pages;

// Fills the sums of the pages of `bytes` bytes; zeros follow the last. instructions: 2 uses the best that the processor
// has, 1 none beyond AVX2, 0 none but plain ones; the sums are the same. -1: a negative argument.
BLOOMERY_API int32_t bloomery_page_sums(const void* content, int64_t bytes, int32_t instructions, uint32_t* sums);

// Checks the pages, not checked before, of the byte ranges [begins[i], ends[i]). -2: a range leaves the file. -3: a page
// is not what was written.
BLOOMERY_API int32_t bloomery_check_pages(const bloomery_pages* pages, int64_t count, const int64_t* begins,
                                          const int64_t* ends);

// --- gather.cpp: samples from token files (bloomery/data_loader/reading.py)

// Reads `rows` samples of `count` tokens from `size` mapped tokens of a type (1 u8, 2 i8, 3 i16, 4 i32, 5 i64,
// 8 u16). Sample r begins at token starts[r] and fills row places[r] of out, [.., count], with the low 32 bits of
// each id; its largest, taken as unsigned, goes to largest[r]. Pages that are not in memory are asked for `ahead`
// samples before they are read; 0 asks for none. pages: the file that the tokens lie in, of which a page is checked
// before it is read for the first time; null checks nothing. -1: no such type. -2: a sample leaves the tokens. -3: a
// page is not what was written.
BLOOMERY_API int32_t bloomery_gather(const void* tokens, int32_t type, int64_t size, int64_t rows,
                                     const int64_t* starts, const int64_t* places, int64_t count, int64_t ahead,
                                     const bloomery_pages* pages, int32_t* out, uint64_t* largest);

// The same from documents laid end to end in another order: document order[k] ends at token ends[k] of that row,
// and begins at byte pointers[order[k]] (unaligned) of the file. starts count in the row. -2: a sample leaves it, or
// with `pages` the file.
BLOOMERY_API int32_t bloomery_gather_documents(const void* tokens, int32_t type, int64_t rows, const int64_t* starts,
                                               const int64_t* places, int64_t count, int64_t ahead,
                                               const bloomery_pages* pages, const void* pointers,
                                               const uint32_t* order, const int64_t* ends, int64_t documents,
                                               int32_t* out, uint64_t* largest);

// --- stream.cpp: copies beside what computes (bloomery/checkpoint/staging.py)

// memcpy, but what is written is left in no cache: for more than caches hold, it is also quicker.
BLOOMERY_API void bloomery_stream_copy(void* to, const void* from, int64_t bytes);

// --- quantise.cpp: how values travel between peers (bloomery/elastic/wire/codec.py)
//
// Codecs: 0 fp32, 1 bf16, 2 int8, 3 int4. In threads > 1 a long array is worked on by so many.

// Bytes that `count` values take. -1: no such codec, or a negative count.
BLOOMERY_API int64_t bloomery_encoded_size(int32_t codec, int64_t count);

// -1: no such codec; -2: something is not finite, or beyond 2^120; what was written is then undefined.
BLOOMERY_API int32_t bloomery_encode(int32_t codec, const float* values, int64_t count, int32_t threads, uint8_t* out);
BLOOMERY_API int32_t bloomery_decode(int32_t codec, const uint8_t* encoded, int64_t count, int32_t threads, float* out);
// sum[i] += what the codes decode to, in one pass.
BLOOMERY_API int32_t bloomery_accumulate(int32_t codec, const uint8_t* encoded, int64_t count, int32_t threads,
                                         float* sum);

// The bits of the largest magnitude; from 0x7F800000 on, something is not finite.
BLOOMERY_API int32_t bloomery_largest(const float* values, int64_t count, int32_t threads, uint32_t* bits);

// --- mac.cpp

// SipHash-2-4 with 128 bits; a key of 16 bytes.
BLOOMERY_API int32_t bloomery_siphash128(const uint8_t* key, const uint8_t* data, int64_t bytes, uint8_t* out);

// --- frame.cpp

// Writes the keyed checksum of a frame (a header of 64 bytes that says its length, and the payload) into its header.
BLOOMERY_API int32_t bloomery_seal_frame(const uint8_t* key, uint64_t epoch, uint8_t* frame);

// --- ring.cpp: one member's end of a ring over connected stream sockets (bloomery/elastic/wire/ring.py)

#define BLOOMERY_RING_TEXT 256

// Kinds of failure, and of what a call may not do (negative).
enum {
    BLOOMERY_RING_CLOSED = 1,
    BLOOMERY_RING_STALLED = 2,
    BLOOMERY_RING_DEADLINE = 3,
    BLOOMERY_RING_AUTHENTICATION = 4,
    BLOOMERY_RING_GARBAGE = 5,
    BLOOMERY_RING_CANCELLED = 6,
    BLOOMERY_RING_NOT_FINITE = 7,  // own values: nothing was sent, and the ring can be used again
    BLOOMERY_RING_POISONED = 8,    // it failed before
    BLOOMERY_RING_BAD_ARGUMENT = -1,
    BLOOMERY_RING_FORKED = -2,  // made in another process
    BLOOMERY_RING_BUSY = -3,    // another thread is in a call
};

enum { BLOOMERY_RING_NOBODY = 0, BLOOMERY_RING_PREVIOUS = 1, BLOOMERY_RING_NEXT = 2 };

typedef struct {
    uint32_t size;  // of this struct
    int32_t index, members, streams, codec, lane;
    int32_t threads;             // beside the calling one; 0: it computes too
    int32_t reserved;
    int64_t chunk;               // values a frame, a multiple of 512; 0: chosen by the array's size
    const int32_t* next;         // descriptors, one a stream; they stay the caller's
    const int32_t* previous;
    const uint8_t* send_keys;    // 32 bytes a stream
    const uint8_t* receive_keys;
} bloomery_ring_options;

typedef struct {
    uint32_t size;
    float weight;
    const float* values;
    float* out;       // may be values; undefined after a failure
    float* residual;  // may be null
    int64_t count;
    uint64_t round, epoch;
    double stall_s, deadline_s;
    double rate_limit_bytes_s;  // of what is sent; 0: none
} bloomery_ring_call;

typedef struct {
    uint32_t size;
    int32_t kind, culprit;
    int32_t reserved;
    int64_t sent_bytes, received_bytes;
    double seconds;
    double blocked_s;  // in which something was to be sent and no socket took it
    // What the kernel saw on the way to the next member; 0 where its sockets are no TCP.
    int64_t delivered_bytes, lost_bytes;  // that arrived, by the mean size of a segment; sent again
    double best_bytes_s;                  // in the best quarter of a second
    char text[BLOOMERY_RING_TEXT];
} bloomery_ring_report;

// Null: a bad argument, or the system refused an eventfd.
BLOOMERY_API void* bloomery_ring_create(const bloomery_ring_options* options);
// out = the sum over the members of weight * values, equal to the bit on all of them. Collective over the ring.
BLOOMERY_API int32_t bloomery_ring_all_reduce(void* ring, const bloomery_ring_call* call, bloomery_ring_report* report);
// From any thread. When it returns no call is running, nor will one run again.
BLOOMERY_API int32_t bloomery_ring_cancel(void* ring);
// Cancels and frees.
BLOOMERY_API int32_t bloomery_ring_destroy(void* ring);

// --- attention.cpp: causal self-attention on AMX units (bloomery/model/kernels.py)

// bf16 vectors [samples, length, heads, width], strides in elements; heads lie beside each other.
typedef struct {
    void* data;
    int64_t sample_stride, position_stride;
} bloomery_vectors;

typedef struct {
    int64_t samples, length, heads, kv_heads, width;
    float scale;
    int32_t threads;
    // GOMP_parallel of the runtime whose threads compute, so that there are no second ones; null: this thread alone.
    void (*parallel)(void (*work)(void*), void* argument, unsigned threads, unsigned flags);
    // Rotary embedding of queries and keys, [length, width / 2]: halves turned against each other. Null: none.
    const float *cosines, *sines;
    bloomery_vectors query, key, value, out;
    float* log_partition;  // [samples, heads, length]: natural, of the scaled scores
    bloomery_vectors out_gradient, query_gradient, key_gradient, value_gradient;
} bloomery_attention;

// Whether this processor has the units, and the system lets us use them.
BLOOMERY_API int32_t bloomery_attention_units(void);
// Fills out and log_partition, and reads no gradient. -1: a shape that is not supported (width is even,
// kv_heads divides heads); -2: no units; -3: no memory.
BLOOMERY_API int32_t bloomery_attend(const bloomery_attention* call);
// Fills the gradients of query, key and value from what forward filled and out_gradient. Errors as above.
BLOOMERY_API int32_t bloomery_attend_backward(const bloomery_attention* call);

// --- entropy.cpp: the loss of bf16 logits, where bloomery_attention_units (bloomery/model/kernels.py)

typedef struct {
    int64_t rows, vocabulary;
    float z_loss;
    int32_t threads;
    void (*parallel)(void (*work)(void*), void* argument, unsigned threads, unsigned flags);  // as above
    const void* logits;      // bf16 [rows, vocabulary]
    const int64_t* targets;  // [rows]; a row whose target is none of the vocabulary counts nothing
    void* slopes;            // bf16 [rows, vocabulary]: of the sum of both terms; may be logits
    float *cross_entropy, *z;  // [rows]
} bloomery_entropy;

// Fills slopes, cross_entropy and z. -2: no units.
BLOOMERY_API int32_t bloomery_slope_entropy(const bloomery_entropy* call);
