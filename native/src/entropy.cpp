// Cross entropy and z-loss of bf16 logits, and their slopes. Each row of logits is read into the cache once.
#include "lanes.h"

#if HAS_LANES

#include <math.h>

namespace {

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

constexpr int64_t kRowsAtOnce = 16;

struct Shared {
    const bloomery_entropy* call;
    int64_t next;  // next row that no thread has taken
};

inline __m512 logits_at(const Bf16* row, int64_t column, int64_t count) {
    const __mmask16 mask = first_lanes(count - column);
    return widened(_mm256_maskz_loadu_epi16(mask, row + column));
}

void one_row(const bloomery_entropy& call, int64_t row) {
    const int64_t count = call.vocabulary, target = call.targets[row];
    const Bf16* logits = static_cast<const Bf16*>(call.logits) + row * count;
    Bf16* slopes = static_cast<Bf16*>(call.slopes) + row * count;
    const bool counts = target >= 0 && target < count;
    if (!counts) {
        call.cross_entropy[row] = call.z[row] = 0.0f;
        for (int64_t column = 0; column < count; column += kLanes)
            _mm256_mask_storeu_epi16(slopes + column, first_lanes(count - column), _mm256_setzero_si256());
        return;
    }
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t column = 0; column < count; column += kLanes)
        most = _mm512_mask_max_ps(most, first_lanes(count - column), most, logits_at(logits, column, count));
    const float largest = _mm512_reduce_max_ps(most);
    const __m512 unit = _mm512_set1_ps(kLog2E), shift = _mm512_set1_ps(largest);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t column = 0; column < count; column += kLanes) {
        const __m512 x = _mm512_sub_ps(logits_at(logits, column, count), shift);
        const __m512 weight = power_of_two(_mm512_mul_ps(x, unit));
        sum = _mm512_mask_add_ps(sum, first_lanes(count - column), sum, weight);
    }
    const float log_partition = largest + logf(_mm512_reduce_add_ps(sum));
    const float pull = 1.0f + 2.0f * call.z_loss * log_partition;
    const __m512 partition = _mm512_set1_ps(log_partition), factor = _mm512_set1_ps(pull);
    // Computed before the slopes are written, because they may overwrite the logits.
    const __m512 wanted = _mm512_sub_ps(logits_at(logits, target, target + 1), partition);
    for (int64_t column = 0; column < count; column += kLanes) {
        const __m512 x = _mm512_sub_ps(logits_at(logits, column, count), partition);
        const __m512 slope = _mm512_mul_ps(power_of_two(_mm512_mul_ps(x, unit)), factor);
        _mm256_mask_storeu_epi16(slopes + column, first_lanes(count - column), rounded(slope));
    }
    const __m512 slope = _mm512_fmsub_ps(power_of_two(_mm512_mul_ps(wanted, unit)), factor, _mm512_set1_ps(1.0f));
    _mm256_mask_storeu_epi16(slopes + target, 1, rounded(slope));
    call.cross_entropy[row] = -_mm512_cvtss_f32(wanted);
    call.z[row] = call.z_loss * log_partition * log_partition;
}

void work(void* argument) {
    Shared& shared = *static_cast<Shared*>(argument);
    const int64_t rows = shared.call->rows;
    for (int64_t first; (first = __atomic_fetch_add(&shared.next, kRowsAtOnce, __ATOMIC_RELAXED)) < rows;)
        for (int64_t row = first; row < first + kRowsAtOnce && row < rows; ++row) one_row(*shared.call, row);
}

#pragma GCC pop_options

}  // namespace

int32_t bloomery_slope_entropy(const bloomery_entropy* call) {
    if (!bloomery_attention_units()) return -2;
    Shared shared{call, 0};
    if (call->parallel == nullptr || call->threads < 2)
        work(&shared);
    else
        call->parallel(work, &shared, static_cast<unsigned>(call->threads), 0);
    return 0;
}

#else

int32_t bloomery_slope_entropy(const bloomery_entropy*) { return -2; }

#endif
