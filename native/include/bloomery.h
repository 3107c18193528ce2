// The C ABI between bloomery and its native library. It uses neither Python nor torch, and no exception crosses it.
//
// Functions return 0, or a negative error number that is explained beside each; -4 always means that no memory was
// available. Memory belongs to the caller unless a function says otherwise.
#pragma once

#include <stdint.h>

#if defined(__clang__) || !defined(__GNUC__) || !defined(__x86_64__) || defined(BLOOMERY_NO_CLONES)
#define BLOOMERY_CLONES
#else
// The compiler makes several variants of a function, and the best for the processor is chosen when the library is
// loaded; so the library is never built with -march=native. Builds with sanitizers define BLOOMERY_NO_CLONES, because
// the sanitizers' runtimes have not started yet when variants are chosen.
#if __GNUC__ >= 12
#define BLOOMERY_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define BLOOMERY_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif

#define BLOOMERY_API extern "C" __attribute__((visibility("default")))

// Raised by one at each change of a signature, but not for a new function, without which Python still works.
// bloomery/native.py refuses a library of another version.
#define BLOOMERY_ABI_VERSION 9

BLOOMERY_API int32_t bloomery_abi_version(void);

// --- order.cpp: the `bloomery` order of samples (bloomery/data/order.py, mixture.py)

// out[i] = the image of index[i] under the permutation of range(n) with keys[i], or with keys[0] if key_count is 1;
// 1 <= n <= 2^62.
BLOOMERY_API int32_t bloomery_permute(const int64_t* index, int64_t count, int64_t n, const uint64_t* keys,
                                      int64_t key_count, int64_t* out);

// Advances the quotas of a mixture of n datasets by `blocks` blocks, in place. Each block gives `chairs` extra samples,
// at most one to a dataset; dataset i is due steps[i] / 2^46 of an extra sample in each. whole + residue / 2^46: extras
// due so far. whole + ahead: extras given so far. Returns -1 for a state that cannot be reached.
BLOOMERY_API int32_t bloomery_walk_quotas(int64_t n, const int64_t* steps, int64_t chairs, int64_t blocks,
                                          int64_t* whole, int64_t* residue, int64_t* ahead);

// Fills a block of `size` samples, a power of two, with quotas[i] samples of dataset i, numbered from first_turns[i]
// on. Their places are given by the permutation of range(size) with `key`.
BLOOMERY_API int32_t bloomery_mix_block(int64_t n, const int64_t* quotas, const int64_t* first_turns, int64_t size,
                                        uint64_t key, int32_t* datasets, int64_t* turns);

// out[i] = the window of dataset datasets[i] that is its turns[i]-th sample. windows: how many each of the n datasets
// has. Keys are derived from (seed, purpose, dataset, epoch).
BLOOMERY_API int32_t bloomery_windows(int64_t n, const int64_t* windows, uint64_t seed, uint64_t purpose,
                                      const int64_t* datasets, const int64_t* turns, int64_t count, int64_t* out);

// --- fair.cpp: mixtures that are fair at every sample (bloomery/data/fair_quotas.py)

// Advances the counts of n datasets from stream index `begin` by `blocks` blocks of `size` samples. shares[i] / one is
// dataset i's share; the shares sum to one <= 2^61. Returns -1 for counts that cannot be reached.
BLOOMERY_API int32_t bloomery_fair_counts(int64_t n, const int64_t* shares, int64_t one, int64_t begin, int64_t size,
                                          int64_t blocks, int64_t* counts);

// Fills the dataset and the number within it of each of the `size` <= 2^30 samples from stream index `begin` on, given
// the datasets' counts at both ends. Returns -1 if no fair schedule has these counts.
BLOOMERY_API int32_t bloomery_fair_block(int64_t n, const int64_t* shares, int64_t one, int64_t begin, int64_t size,
                                         const int64_t* counts, const int64_t* counts_after, int32_t* datasets,
                                         int64_t* turns);

// --- megatron.cpp: Megatron's order of samples (bloomery/data/megatron_order.py)

// Shuffles as numpy's RandomState does, from its state on: the 624 words of MT19937 and the position in them.
BLOOMERY_API int32_t bloomery_shuffle(uint32_t* state, int32_t* place, uint32_t* values, int64_t count);

// ends[i] = the sum of lengths[order[0..i]].
BLOOMERY_API int32_t bloomery_cumulate(const void* lengths, const uint32_t* order, int64_t count, int64_t* ends);

// For sample s = first, first + 1, ...: chooses the first dataset with the largest weights[i] * max(s, 1) - counts[i].
BLOOMERY_API int32_t bloomery_blend(int64_t n, const double* weights, int64_t first, int64_t count, int64_t* counts,
                                    uint16_t* datasets);

// --- pages.cpp: sums of pages of 4 KiB (bloomery/data/page_sums.py, page_check.py)

// A mapped file, and the sums of what was written into it. Threads may share one.
typedef struct {
    const void* content;   // the address of byte 0 of the file
    int64_t bytes;         // the size of the file
    const uint32_t* sums;  // one for each page
    uint64_t* checked;     // one bit for each page, set once the page agreed with its sum
} bloomery_pages;

// Fills the sums of the pages of `bytes` bytes; the last page is padded with zeros. instructions: 2 uses the best that
// the processor has, 1 nothing beyond AVX2, 0 plain ones alone; the sums are the same. Returns -1 for a negative argument.
BLOOMERY_API int32_t bloomery_page_sums(const void* content, int64_t bytes, int32_t instructions, uint32_t* sums);

// Checks those pages of the byte ranges [begins[i], ends[i]) that were not checked before. Returns -2 if a range leaves
// the file, -3 if a page is not what was written.
BLOOMERY_API int32_t bloomery_check_pages(const bloomery_pages* pages, int64_t count, const int64_t* begins,
                                          const int64_t* ends);

// --- gather.cpp: samples from token files (bloomery/data_loader/reading.py)

// Reads `rows` samples of `count` tokens from `size` mapped tokens of a type (1 u8, 2 i8, 3 i16, 4 i32, 5 i64,
// 8 u16). Sample r begins at token starts[r] and fills row places[r] of out, [.., count], with the low 32 bits of
// each id; largest[r] is its largest id, as unsigned. Pages that are not in memory are prefetched `ahead` samples
// before they are read; 0 prefetches none. pages: the file that contains the tokens, whose pages are checked before
// they are read for the first time; null checks nothing. Returns -1 for an unknown type, -2 if a sample leaves the
// tokens, -3 if a page is not what was written.
BLOOMERY_API int32_t bloomery_gather(const void* tokens, int32_t type, int64_t size, int64_t rows,
                                     const int64_t* starts, const int64_t* places, int64_t count, int64_t ahead,
                                     const bloomery_pages* pages, int32_t* out, uint64_t* largest);

// The same for a row of documents that are concatenated in another order than in the file: document order[k] ends at
// token ends[k] of the row, and begins at byte pointers[order[k]] (unaligned) of the file. starts are tokens of the row.
// Returns -2 if a sample leaves the row or, with `pages`, the file.
BLOOMERY_API int32_t bloomery_gather_documents(const void* tokens, int32_t type, int64_t rows, const int64_t* starts,
                                               const int64_t* places, int64_t count, int64_t ahead,
                                               const bloomery_pages* pages, const void* pointers,
                                               const uint32_t* order, const int64_t* ends, int64_t documents,
                                               int32_t* out, uint64_t* largest);

// --- stream.cpp: copies beside computing threads (bloomery/checkpoint/save/staging.py)

// memcpy that leaves nothing in the caches. For more bytes than the caches hold it is also faster.
BLOOMERY_API void bloomery_stream_copy(void* to, const void* from, int64_t bytes);

// --- quantise.cpp: codecs of values between peers (bloomery/transport/gradient_codec.py)
//
// Codecs: 0 fp32, 1 bf16, 2 int8, 3 int4. threads: how many process a long array.

// Returns the encoded size of `count` values in bytes; -1 for an unknown codec or a negative count.
BLOOMERY_API int64_t bloomery_encoded_size(int32_t codec, int64_t count);

// Returns -1 for an unknown codec, -2 if a value is not finite or beyond 2^120; the output is then undefined.
BLOOMERY_API int32_t bloomery_encode(int32_t codec, const float* values, int64_t count, int32_t threads, uint8_t* out);
BLOOMERY_API int32_t bloomery_decode(int32_t codec, const uint8_t* encoded, int64_t count, int32_t threads, float* out);
// sum[i] += the decoded values, in one pass.
BLOOMERY_API int32_t bloomery_accumulate(int32_t codec, const uint8_t* encoded, int64_t count, int32_t threads,
                                         float* sum);

// Returns the bits of the largest magnitude; from 0x7F800000 on, some value is not finite.
BLOOMERY_API int32_t bloomery_largest(const float* values, int64_t count, int32_t threads, uint32_t* bits);

// --- mac.cpp

// SipHash-2-4 with a result of 128 bits; the key has 16 bytes.
BLOOMERY_API int32_t bloomery_siphash128(const uint8_t* key, const uint8_t* data, int64_t bytes, uint8_t* out);

// --- frame.cpp

// Writes the keyed checksum of a frame into its header. A frame is a header of 64 bytes, which contains the payload's
// length, and the payload.
BLOOMERY_API int32_t bloomery_seal_frame(const uint8_t* key, uint64_t epoch, uint8_t* frame);

// --- ring.cpp: one member's end of a ring over connected stream sockets (bloomery/transport/ring_all_reduce.py)

#define BLOOMERY_RING_TEXT 256

// Kinds of failure; the negative ones are wrong uses of the functions.
enum {
    BLOOMERY_RING_CLOSED = 1,
    BLOOMERY_RING_STALLED = 2,
    BLOOMERY_RING_DEADLINE = 3,
    BLOOMERY_RING_AUTHENTICATION = 4,
    BLOOMERY_RING_GARBAGE = 5,
    BLOOMERY_RING_CANCELLED = 6,
    BLOOMERY_RING_NOT_FINITE = 7,  // of own values; nothing was sent, and the ring can be used again
    BLOOMERY_RING_POISONED = 8,    // the ring failed before
    BLOOMERY_RING_BAD_ARGUMENT = -1,
    BLOOMERY_RING_FORKED = -2,  // the ring was made in another process
    BLOOMERY_RING_BUSY = -3,    // another thread is in a call of this ring
};

// As the codec of a ring: it hands each member's segment round as it is, bit for bit, and adds nothing up.
enum { BLOOMERY_RING_WORDS = 4 };

enum { BLOOMERY_RING_NOBODY = 0, BLOOMERY_RING_PREVIOUS = 1, BLOOMERY_RING_NEXT = 2 };

typedef struct {
    uint32_t size;  // of this struct, in bytes
    int32_t index, members, streams, codec, lane;  // codec: one of values between peers, or BLOOMERY_RING_WORDS
    int32_t threads;             // beside the calling thread; 0: the calling thread computes too
    int32_t gather;              // 1 + the codec of complete sums; 0: `codec`, in which values are added up
    int64_t chunk;               // values of a frame, a multiple of 512; 0: chosen by the array's size
    const int32_t* next;         // descriptors, one for each stream; they stay the caller's
    const int32_t* previous;
    const uint8_t* send_keys;    // 32 bytes for each stream
    const uint8_t* receive_keys;
} bloomery_ring_options;

typedef struct {
    uint32_t size;
    float weight;
    const float* values;
    float* out;       // may be the same memory as values; undefined after a failure
    float* residual;  // may be null
    int64_t count;
    uint64_t round, epoch;
    double stall_s, deadline_s;
    double rate_limit_bytes_s;  // the most that is sent; 0: no limit
} bloomery_ring_call;

typedef struct {
    uint32_t size;
    int32_t kind, culprit;
    int32_t reserved;
    int64_t sent_bytes, received_bytes;
    double seconds;
    double blocked_s;  // how long frames were ready and no socket accepted them
    // Statistics of the kernel about the connections to the next member; 0 if its sockets are not TCP.
    int64_t delivered_bytes, lost_bytes;  // delivered, by the mean size of a segment; retransmitted
    double best_bytes_s;                  // in the best quarter of a second
    char text[BLOOMERY_RING_TEXT];
} bloomery_ring_report;

// Returns null for a bad argument, or if the system refused an eventfd.
BLOOMERY_API void* bloomery_ring_create(const bloomery_ring_options* options);
// out = the sum over the members of weight * values, bit-identical on all members. Collective over the ring.
// A ring of words fills out with the members' segments instead: count is the members times the length of a segment, and
// `values`, in which the own segment lies at its place, must be the same memory as out.
BLOOMERY_API int32_t bloomery_ring_all_reduce(void* ring, const bloomery_ring_call* call, bloomery_ring_report* report);
// From now on other members may begin a call so many seconds later than this one. No call may be running.
BLOOMERY_API int32_t bloomery_ring_grace(void* ring, double seconds);
// May be called by any thread. When it returns, no call is running, and none will run again.
BLOOMERY_API int32_t bloomery_ring_cancel(void* ring);
// Cancels the ring and frees it.
BLOOMERY_API int32_t bloomery_ring_destroy(void* ring);

// --- attention.cpp: causal self-attention on AMX units (bloomery/model/native_kernels.py)

// bf16 vectors [samples, length, heads, width]; strides are in elements; the heads of a position are contiguous.
typedef struct {
    void* data;
    int64_t sample_stride, position_stride;
} bloomery_vectors;

typedef struct {
    int64_t samples, length, heads, kv_heads, width;
    float scale;
    int32_t threads;
    // GOMP_parallel of torch's OpenMP runtime, so that no second pool of threads is made; null: this thread alone.
    void (*parallel)(void (*work)(void*), void* argument, unsigned threads, unsigned flags);
    // The rotary embedding of queries and keys, [length, width / 2], which rotates the halves of a vector; null: none.
    const float *cosines, *sines;
    bloomery_vectors query, key, value, out;
    float* log_partition;  // [samples, heads, length]: natural logarithms, of the scaled scores
    bloomery_vectors out_gradient, query_gradient, key_gradient, value_gradient;
} bloomery_attention;

// Returns whether this processor has the units and the system allows their use.
BLOOMERY_API int32_t bloomery_attention_units(void);
// Fills out and log_partition, and reads no gradient. Returns -1 for an unsupported shape (width must be even,
// and kv_heads must divide heads), -2 without units, -3 without memory.
BLOOMERY_API int32_t bloomery_attend(const bloomery_attention* call);
// Fills the gradients of query, key and value from out_gradient and the results of forward. Errors as above.
BLOOMERY_API int32_t bloomery_attend_backward(const bloomery_attention* call);

// --- entropy.cpp: the loss of bf16 logits, on processors with attention units (bloomery/model/native_kernels.py)

typedef struct {
    int64_t rows, vocabulary;
    float z_loss;
    int32_t threads;
    void (*parallel)(void (*work)(void*), void* argument, unsigned threads, unsigned flags);  // as above
    const void* logits;      // bf16 [rows, vocabulary]
    const int64_t* targets;  // [rows]; a row whose target is outside the vocabulary does not count
    void* slopes;            // bf16 [rows, vocabulary]: of the sum of both terms; may be the same memory as logits
    float *cross_entropy, *z;  // [rows]
} bloomery_entropy;

// Fills slopes, cross_entropy and z. Returns -2 without units.
BLOOMERY_API int32_t bloomery_slope_entropy(const bloomery_entropy* call);
