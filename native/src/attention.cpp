// Causal self-attention of bf16 vectors on AMX units. Scores, weights and sums are fp32 and stay in the L2 cache.
//
// The passes are those of Dao, FlashAttention-2 (2023). Forward iterates over blocks of queries and keeps a running
// maximum of their scores. Backward iterates over blocks of keys and computes the scores transposed, [keys, queries].
// In that form weights and slopes are already the left factors that the gradients of values and keys need, and only
// the query's gradient has to be transposed at the end.
// One thread computes a whole key/value head, so results do not depend on the number of threads.
#include "tiles.h"

#if HAS_LANES

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

constexpr int64_t kForwardKeys = 512;   // keys whose scores are held at a time
constexpr int64_t kBackwardKeys = 64;
constexpr int64_t kBackwardQueries = 256;
constexpr int64_t kStagger = 16;        // floats of padding after a row, so that rows do not share a cache set
constexpr float kNever = 1e30f;         // a log-partition that makes every weight 0

// Memory of one thread, given out in pieces that begin at cache lines.
struct Arena {
    char* memory;
    int64_t used;
    template <typename T>
    T* take(int64_t count) {
        T* piece = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + used);
        used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return piece;
    }
};

typedef bloomery_attention Call;

inline Rows head_of(const Call& call, const bloomery_vectors& vectors, int64_t sample, int64_t head) {
    Bf16* data = static_cast<Bf16*>(vectors.data) + sample * vectors.sample_stride + head * call.width;
    return {data, vectors.position_stride, call.length, call.width};
}

inline Rotary rotary_of(const Call& call) { return {call.cosines, call.sines}; }

// One head as copy_rows has laid it out.
inline Rows side_by_side(const Call& call, Bf16* data) { return {data, padded(call.width), call.length, call.width}; }

struct Forward {
    uint32_t *keys, *values;
    Bf16 *plain_keys, *queries, *weights;
    float *scores, *sums;

    static constexpr int64_t kScoreRow = kForwardKeys + kStagger;
    static constexpr int64_t kWeightRow = kForwardKeys + 2 * kStagger;

    Forward(const Call& call, Arena& arena) {
        const int64_t length = padded(call.length), width = padded(call.width);
        keys = arena.take<uint32_t>(length * width / 2);
        values = arena.take<uint32_t>(length * width / 2);
        plain_keys = arena.take<Bf16>(length * width);
        queries = arena.take<Bf16>(kBlock * width);
        weights = arena.take<Bf16>(kBlock * kWeightRow);
        scores = arena.take<float>(kBlock * kScoreRow);
        sums = arena.take<float>(kBlock * width);
    }

    void item(const Call& call, int64_t sample, int64_t kv_head) {
        copy_rows(head_of(call, call.key, sample, kv_head), rotary_of(call), 0, plain_keys);
        turn_rows(side_by_side(call, plain_keys), keys);
        pair_rows(head_of(call, call.value, sample, kv_head), values);
        const int64_t group = call.heads / call.kv_heads;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            const Rows query = head_of(call, call.query, sample, head);
            const Rows out = head_of(call, call.out, sample, head);
            float* log_partition = call.log_partition + (sample * call.heads + head) * call.length;
            for (int64_t first = 0; first < call.length; first += kBlock)
                block(call, query, out, log_partition, first);
        }
    }

    // Computes queries [first, first + kBlock) over all keys that they may attend to.
    void block(const Call& call, const Rows& query, const Rows& out, float* log_partition, int64_t first) {
        const int64_t width = padded(call.width);
        const int64_t rows = call.length - first < kBlock ? call.length - first : kBlock;
        copy_rows({query.data + first * query.stride, query.stride, rows, call.width}, rotary_of(call), first, queries);
        const float unit = call.scale * kLog2E;
        float largest[kBlock], total[kBlock];
        for (int64_t row = 0; row < kBlock; ++row) largest[row] = -INFINITY, total[row] = 0.0f;
        for (int64_t start = 0; start < first + kBlock; start += kForwardKeys) {
            const int64_t left = first + kBlock - start, count = left < kForwardKeys ? left : kForwardKeys;
            for (int64_t key = 0; key < count; key += kBlock)
                multiply(scores + key, 4 * kScoreRow, false, queries, 2 * width, keys + (start + key) * width / 2,
                         32 * width, 4 * kTile, width / 32);
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t seen = first + row + 1 - start;
                weigh(row, seen < count ? seen : count, count, unit, largest, total, start > 0, width);
            }
            for (int64_t column = 0; column < width; column += kBlock)
                multiply(sums + column, 4 * width, start > 0, weights, 2 * kWeightRow,
                         values + start * width / 2 + column * kRows, 4 * kTile, 4 * kRows * width, count / kBlock);
        }
        for (int64_t row = 0; row < rows; ++row) {
            const __m512 factor = _mm512_set1_ps(1.0f / total[row]);
            for (int64_t column = 0; column < call.width; column += kRows)
                out.give(first + row, column,
                         _mm512_mul_ps(_mm512_loadu_ps(sums + row * width + column), factor), call.width);
            log_partition[first + row] = (largest[row] + log2f(total[row])) / kLog2E;
        }
    }

    // Turns the scores of one query into weights relative to the largest score so far, as powers of two.
    inline void weigh(int64_t row, int64_t seen, int64_t count, float unit, float* largest, float* total,
                      bool goes_on, int64_t width) {
        const float* from = scores + row * kScoreRow;
        Bf16* to = weights + row * kWeightRow;
        const __m512 scale = _mm512_set1_ps(unit);
        const __mmask16 rest = static_cast<__mmask16>((1u << (seen % 16)) - 1);
        const int64_t whole = seen / 16 * 16;
        __m512 most = _mm512_set1_ps(-INFINITY);
        for (int64_t key = 0; key < whole; key += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(from + key));
        if (rest) most = _mm512_mask_max_ps(most, rest, most, _mm512_loadu_ps(from + whole));
        const float here = _mm512_reduce_max_ps(most) * unit;
        const float before = largest[row], now = here > before ? here : before;
        const __m512 minus = _mm512_set1_ps(now);
        __m512 sum = _mm512_setzero_ps();
        int64_t key = 0;
        for (; key < whole; key += 16) {
            const __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(from + key), scale, minus));
            sum = _mm512_add_ps(sum, weight);
            store_half(to + key, rounded(weight));
        }
        if (rest) {
            const __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(from + key), scale, minus);
            const __m512 weight = _mm512_maskz_mov_ps(rest, power_of_two(x));
            sum = _mm512_add_ps(sum, weight);
            store_half(to + key, rounded(weight));
            key += 16;
        }
        for (; key < count; key += 16) store_half(to + key, _mm256_setzero_si256());
        float kept = 1.0f;
        if (goes_on) {
            kept = exp2f(before - now);
            float* so_far = sums + row * width;
            for (int64_t column = 0; column < width; column += 16)
                _mm512_storeu_ps(so_far + column,
                                 _mm512_mul_ps(_mm512_loadu_ps(so_far + column), _mm512_set1_ps(kept)));
        }
        total[row] = (goes_on ? total[row] * kept : 0.0f) + _mm512_reduce_add_ps(sum);
        largest[row] = now;
    }
};

struct Backward {
    Bf16 *keys, *values, *keys_by_width, *queries;  // left factors, and the rows that right factors are made from
    uint32_t *turned_queries, *paired_queries, *turned_slopes, *paired_slopes;  // right factors
    float *log_partition, *common;                  // of each query: its log-partition to base 2; the part that its slopes share
    Bf16 *weights, *slopes;                         // [keys x queries] of a block
    uint32_t* slope_pairs;                          // the same slopes as a right factor
    float *scores, *products;                       // [32 x 32]
    float *query_sums, *key_sums, *value_sums;      // gradients; the query's is transposed
    int64_t turned_row, query_row;

    static constexpr int64_t kWeightRow = kBackwardQueries + 2 * kStagger;

    Backward(const Call& call, Arena& arena) {
        const int64_t length = padded(call.length) + kBlock, width = padded(call.width), numel = length * width;
        turned_row = length + 2 * kStagger;
        query_row = length + kStagger;
        keys = arena.take<Bf16>(numel);
        values = arena.take<Bf16>(numel);
        queries = arena.take<Bf16>(numel);
        keys_by_width = arena.take<Bf16>(width * turned_row);
        turned_queries = arena.take<uint32_t>(numel / 2);
        paired_queries = arena.take<uint32_t>(numel / 2);
        turned_slopes = arena.take<uint32_t>(numel / 2);
        paired_slopes = arena.take<uint32_t>(numel / 2);
        log_partition = arena.take<float>(length);
        common = arena.take<float>(length);
        weights = arena.take<Bf16>(kBackwardKeys * kWeightRow);
        slopes = arena.take<Bf16>(kBackwardKeys * kWeightRow);
        slope_pairs = arena.take<uint32_t>(kBackwardKeys / 2 * kBackwardQueries);
        scores = arena.take<float>(kBlock * kBlock);
        products = arena.take<float>(kBlock * kBlock);
        query_sums = arena.take<float>(width * query_row);
        key_sums = arena.take<float>(numel);
        value_sums = arena.take<float>(numel);
    }

    void item(const Call& call, int64_t sample, int64_t kv_head) {
        const int64_t width = padded(call.width), length = padded(call.length);
        const int64_t group = call.heads / call.kv_heads;
        const size_t bytes = static_cast<size_t>(4 * (length + kBlock) * width);
        copy_rows(head_of(call, call.key, sample, kv_head), rotary_of(call), 0, keys);
        copy_rows(head_of(call, call.value, sample, kv_head), {nullptr, nullptr}, 0, values);
        turn_keys(width, length);
        memset(key_sums, 0, bytes);
        memset(value_sums, 0, bytes);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            copy_rows(head_of(call, call.query, sample, head), rotary_of(call), 0, queries);
            const Rows query = side_by_side(call, queries);
            const Rows slope = head_of(call, call.out_gradient, sample, head);
            turn_rows(query, turned_queries);
            pair_rows(query, paired_queries);
            turn_rows(slope, turned_slopes);
            pair_rows(slope, paired_slopes);
            take_common(call, head_of(call, call.out, sample, head), slope,
                        call.log_partition + (sample * call.heads + head) * call.length);
            memset(query_sums, 0, static_cast<size_t>(4 * width * query_row));
            for (int64_t first = 0; first < length; first += kBackwardKeys)
                for (int64_t start = first; start < length; start += kBackwardQueries)
                    block(call, first, start,
                          length - start < kBackwardQueries ? length - start : kBackwardQueries, length);
            give_queries(call, head_of(call, call.query_gradient, sample, head));
        }
        const Rows key_gradient = head_of(call, call.key_gradient, sample, kv_head);
        const Rows value_gradient = head_of(call, call.value_gradient, sample, kv_head);
        give(key_gradient, rotary_of(call), key_sums, call.scale);
        give(value_gradient, {nullptr, nullptr}, value_sums, 1.0f);
    }

    // Computes keys [first, first + kBackwardKeys) against queries [start, start + count).
    void block(const Call& call, int64_t first, int64_t start, int64_t count, int64_t length) {
        const int64_t width = padded(call.width);
        const int64_t key_count = length - first < kBackwardKeys ? length - first : kBackwardKeys;
        for (int64_t key = 0; key < key_count; key += kBlock)
            for (int64_t query = 0; query < count; query += kBlock) {
                if (start + query < first + key) {
                    weigh_nothing(key, query);
                    continue;
                }
                multiply(scores, 4 * kBlock, false, keys + (first + key) * width, 2 * width,
                         turned_queries + (start + query) * width / 2, 32 * width, 4 * kTile, width / 32);
                multiply(products, 4 * kBlock, false, values + (first + key) * width, 2 * width,
                         turned_slopes + (start + query) * width / 2, 32 * width, 4 * kTile, width / 32);
                weigh(call.scale * kLog2E, key, query, start, start + query == first + key);
            }
        for (int64_t key = 0; key < key_count; key += kBlock)
            for (int64_t column = 0; column < width; column += kBlock) {
                const int64_t at = (first + key) * width + column, right = start * width / 2 + column * kRows;
                multiply(value_sums + at, 4 * width, true, weights + key * kWeightRow, 2 * kWeightRow,
                         paired_slopes + right, 4 * kTile, 4 * kRows * width, count / kBlock);
                multiply(key_sums + at, 4 * width, true, slopes + key * kWeightRow, 2 * kWeightRow,
                         paired_queries + right, 4 * kTile, 4 * kRows * width, count / kBlock);
            }
        for (int64_t row = 0; row < width; row += kBlock)
            for (int64_t query = 0; query < count; query += kBlock)
                multiply(query_sums + row * query_row + start + query, 4 * query_row, true,
                         keys_by_width + row * turned_row + first, 2 * turned_row, slope_pairs + query * kRows,
                         4 * kTile, 4 * kRows * kBackwardQueries, key_count / kBlock);
    }

    inline void weigh(float unit, int64_t key, int64_t query, int64_t start, bool is_diagonal) {
        const __m512 scale = _mm512_set1_ps(unit);
        for (int64_t half = 0; half < kBlock; half += kRows) {
            const __m512 partition = _mm512_loadu_ps(log_partition + start + query + half);
            const __m512 shared = _mm512_loadu_ps(common + start + query + half);
            uint32_t* pairs = slope_pairs + key / 2 * kBackwardQueries + (query + half) * kRows;
            for (int64_t row = 0; row < kBlock; row += 2, pairs += kRows) {
                __m256i made[2];
                for (int64_t one = row; one < row + 2; ++one) {
                    __m512 weight = power_of_two(
                        _mm512_fmsub_ps(_mm512_loadu_ps(scores + one * kBlock + half), scale, partition));
                    // A query attends to its own key and those before it.
                    const int64_t blind = one - half;
                    if (is_diagonal && blind > 0)
                        weight = _mm512_maskz_mov_ps(
                            blind >= 16 ? 0 : static_cast<__mmask16>(0xFFFFu << blind), weight);
                    const __m512 slope = _mm512_mul_ps(
                        weight, _mm512_sub_ps(_mm512_loadu_ps(products + one * kBlock + half), shared));
                    made[one - row] = rounded(slope);
                    store_half(weights + (key + one) * kWeightRow + query + half, rounded(weight));
                    store_half(slopes + (key + one) * kWeightRow + query + half, made[one - row]);
                }
                _mm512_storeu_si512(pairs, paired(made[0], made[1]));
            }
        }
    }

    inline void weigh_nothing(int64_t key, int64_t query) {
        for (int64_t row = key; row < key + kBlock; ++row) {
            memset(weights + row * kWeightRow + query, 0, 2 * kBlock);
            memset(slopes + row * kWeightRow + query, 0, 2 * kBlock);
        }
        memset(slope_pairs + key / 2 * kBackwardQueries + query * kRows, 0, 2 * 4 * kTile);
    }

    void turn_keys(int64_t width, int64_t length) {
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(2 * width)));
        for (int64_t row = 0; row < length; row += kRows)
            for (int64_t column = 0; column < width; column += 2) {
                const __m512i both = _mm512_i32gather_epi32(offsets, keys + row * width + column, 1);
                store_half(keys_by_width + column * turned_row + row, _mm512_cvtepi32_epi16(both));
                store_half(keys_by_width + (column + 1) * turned_row + row,
                           _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
            }
    }

    // The dot product of the output's gradient and the output, which the softmax subtracts from every slope of a query.
    void take_common(const Call& call, const Rows& out, const Rows& slope, const float* partition) {
        for (int64_t row = 0; row < padded(call.length); ++row) {
            if (row >= call.length) {
                log_partition[row] = kNever, common[row] = 0.0f;
                continue;
            }
            __m512 sum = _mm512_setzero_ps();
            for (int64_t column = 0; column < call.width; column += kRows)
                sum = _mm512_fmadd_ps(widened(out.part(row, column)), widened(slope.part(row, column)), sum);
            log_partition[row] = partition[row] * kLog2E;
            common[row] = _mm512_reduce_add_ps(sum);
        }
    }

    void give_queries(const Call& call, const Rows& to) {
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(4 * query_row)));
        const __m512 scale = _mm512_set1_ps(call.scale);
        const Rotary rotary = rotary_of(call);
        const auto sum = [&](int64_t row, int64_t column, int64_t end) __attribute__((always_inline)) {
            return _mm512_mul_ps(
                scale, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), first_lanes(end - column), offsets,
                                                query_sums + column * query_row + row, 1));
        };
        const int64_t half = call.width / 2;
        for (int64_t column = 0; column < (rotary.cosines ? half : call.width); column += kRows)
            for (int64_t row = 0; row < call.length; ++row)
                if (rotary.cosines)
                    rotary.give_back(to, row, column, sum(row, column, half), sum(row, column + half, call.width));
                else
                    to.give(row, column, sum(row, column, call.width), call.width);
    }

    void give(const Rows& to, const Rotary& rotary, const float* sums, float factor) {
        const __m512 scale = _mm512_set1_ps(factor);
        const int64_t half = to.width / 2, width = padded(to.width);
        for (int64_t row = 0; row < to.count; ++row, sums += width)
            for (int64_t column = 0; column < (rotary.cosines ? half : to.width); column += kRows) {
                const __m512 first = _mm512_mul_ps(_mm512_loadu_ps(sums + column), scale);
                if (rotary.cosines)
                    rotary.give_back(to, row, column, first,
                                     _mm512_mul_ps(_mm512_loadu_ps(sums + column + half), scale));
                else
                    to.give(row, column, first, to.width);
            }
    }
};

struct Shared {
    const Call* call;
    int64_t next;  // next item that no thread has taken
};

template <typename Pass>
inline void work(Shared& shared) {
    const Call& call = *shared.call;
    Arena sizing{nullptr, 0};
    Pass measured(call, sizing);
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, static_cast<size_t>(sizing.used))) return;  // the other threads take its items
    Arena arena{static_cast<char*>(memory), 0};
    Pass pass(call, arena);
    {
        const Units units;
        const int64_t items = call.samples * call.kv_heads;
        for (int64_t item; (item = __atomic_fetch_add(&shared.next, 1, __ATOMIC_RELAXED)) < items;)
            pass.item(call, item / call.kv_heads, item % call.kv_heads);
    }
    free(memory);
}

void work_forward(void* shared) { work<Forward>(*static_cast<Shared*>(shared)); }

void work_backward(void* shared) { work<Backward>(*static_cast<Shared*>(shared)); }

#pragma GCC pop_options

bool has_units() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return false;
    uint32_t eax = 7, ebx, ecx = 0, edx;
    asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    const bool has_tiles = (edx >> 24 & 1) && (edx >> 22 & 1);
    eax = 7, ecx = 1;
    asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    const bool has_bf16 = eax >> 5 & 1;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return has_tiles && has_bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

int32_t run(const bloomery_attention* call, void (*function)(void*)) {
    if (call->width % 2 || call->width <= 0 || call->kv_heads <= 0 || call->heads % call->kv_heads) return -1;
    if (!bloomery_attention_units()) return -2;
    Shared shared{call, 0};
    if (call->parallel == nullptr || call->threads < 2)
        function(&shared);
    else
        call->parallel(function, &shared, static_cast<unsigned>(call->threads), 0);
    return shared.next >= call->samples * call->kv_heads ? 0 : -3;
}

}  // namespace

int32_t bloomery_attention_units(void) {
    static const bool there = has_units();
    return there;
}

int32_t bloomery_attend(const bloomery_attention* call) { return run(call, work_forward); }

int32_t bloomery_attend_backward(const bloomery_attention* call) { return run(call, work_backward); }

#else

int32_t bloomery_attention_units(void) { return 0; }

int32_t bloomery_attend(const bloomery_attention*) { return -2; }

int32_t bloomery_attend_backward(const bloomery_attention*) { return -2; }

#endif
