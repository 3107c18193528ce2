// The int8 codec in AVX-512: one pass over memory, a group at a time, which is prefetched into the L1 cache.
#include "wide.h"

#ifdef BLOOMERY_WIDE
#include <immintrin.h>

#include <cstring>

// GCC warns of undefined registers in its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#define WIDE BLOOMERY_WIDE __attribute__((always_inline)) static inline

namespace bloomery::wide {
namespace {

constexpr int64_t kStep = 16;   // values in a register
constexpr int64_t kAtOnce = 4 * kStep;
constexpr int64_t kGroupBytes = 4 + kGroup;
// The processor's own prefetcher stops at each page. What is requested two groups ahead arrives before it is used.
constexpr int64_t kAhead = 2 * kGroup;

WIDE void ask_for(const float* values) {
    for (int64_t i = 0; i < kAtOnce; i += kStep) {
        // Addresses as integers: the last groups prefetch beyond the array, which the processor ignores.
        const uintptr_t address = reinterpret_cast<uintptr_t>(values) + static_cast<uintptr_t>(4 * (kAhead + i));
        _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0);
    }
}

WIDE __m512 values_of(const uint8_t* codes, __m512 scale) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
}

WIDE __m512i larger(__m512i largest, __m512 value) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7FFFFFFF));
    return _mm512_max_epi32(largest, magnitude);
}

// Rounds to the nearest integer, ties to even.
WIDE __m512i rounded(__m512 value, __m512 factor) {
    return _mm512_cvt_roundps_epi32(_mm512_mul_ps(value, factor), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Packing works within quarters of registers and puts words 0, 4, 8, 12 where 0, 1, 2, 3 belong; this undoes it.
WIDE void store_codes(const __m512i* codes, uint8_t* to) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i low = _mm512_packs_epi32(codes[0], codes[1]), high = _mm512_packs_epi32(codes[2], codes[3]);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high)));
}

WIDE bool read_scale(const uint8_t* from, __m512* scale) {
    float one;
    uint32_t bits;
    std::memcpy(&one, from, 4);
    std::memcpy(&bits, from, 4);
    *scale = _mm512_set1_ps(one);
    return bits <= kLargestBits;
}

// Returns the largest magnitude of a group. Writes the sums only where they are not a plain copy of the own values.
template <bool kPlain>
WIDE uint32_t sum_up(const Hop& hop, int64_t begin, const uint8_t* received, __m512 scale, float* sum) {
    const __m512 weight = _mm512_set1_ps(hop.weight);
    __m512i largest[4] = {};
    for (int64_t i = 0; i < kGroup; i += kAtOnce) {
        ask_for(hop.own + begin + i);
        for (int64_t k = 0; k < 4; ++k) {
            const int64_t at = i + k * kStep;
            __m512 value = _mm512_loadu_ps(hop.own + begin + at);
            if (!kPlain) {
                value = _mm512_mul_ps(value, weight);
                if (received) value = _mm512_add_ps(values_of(received + at, scale), value);
                _mm512_storeu_ps(sum + at, value);
            }
            largest[k] = larger(largest[k], value);
        }
    }
    const __m512i low = _mm512_max_epi32(largest[0], largest[1]), high = _mm512_max_epi32(largest[2], largest[3]);
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(low, high)));
}

WIDE void encode(const float* sum, const Hop& hop, int64_t begin, const Scale& scale, float back, uint8_t* to) {
    std::memcpy(to, &scale.divisor, 4);
    const __m512 factor = _mm512_set1_ps(scale.factor), divisor = _mm512_set1_ps(scale.divisor);
    for (int64_t i = 0; i < kGroup; i += kAtOnce) {
        __m512i codes[4];
        for (int64_t k = 0; k < 4; ++k) {
            const int64_t at = i + k * kStep;
            const __m512 value = _mm512_loadu_ps(sum + at);
            codes[k] = rounded(value, factor);
            const __m512 sent = _mm512_mul_ps(_mm512_cvtepi32_ps(codes[k]), divisor);
            if (hop.residual) {
                const __m512 lost = _mm512_mul_ps(_mm512_sub_ps(value, sent), _mm512_set1_ps(back));
                float* residual = hop.residual + begin + at;
                _mm512_storeu_ps(residual, _mm512_add_ps(_mm512_loadu_ps(residual), lost));
            }
            if (hop.out) _mm512_storeu_ps(hop.out + begin + at, sent);
        }
        store_codes(codes, to + 4 + i);
    }
}

}  // namespace

// The portable code processes a last group that is incomplete.

BLOOMERY_WIDE bool combine(const Hop& hop, int64_t count) {
    const float back = hop.weight == 0.0f ? 0.0f : 1.0f / hop.weight;
    const bool is_plain = !hop.received && hop.weight == 1.0f;
    alignas(64) float sum[kGroup];
    bool sound = true;
    int64_t begin = 0, byte = 0;
    for (; begin + kGroup <= count; begin += kGroup, byte += kGroupBytes) {
        const uint8_t* received = hop.received ? hop.received + byte : nullptr;
        __m512 scale = _mm512_setzero_ps();
        if (received) {
            sound &= read_scale(received, &scale);
            received += 4;
        }
        const uint32_t largest = is_plain ? sum_up<true>(hop, begin, nullptr, scale, nullptr)
                                          : sum_up<false>(hop, begin, received, scale, sum);
        sound &= largest <= kLargestBits;
        encode(is_plain ? hop.own + begin : sum, hop, begin, scale_for(largest, 127.0f), back, hop.encoded + byte);
    }
    if (begin == count) return sound;
    const Hop rest{hop.own + begin,
                   hop.received ? hop.received + byte : nullptr,
                   hop.encoded + byte,
                   hop.out ? hop.out + begin : nullptr,
                   hop.residual ? hop.residual + begin : nullptr,
                   hop.weight};
    return portable::combine(kInt8, rest, count - begin) && sound;
}

BLOOMERY_WIDE bool decode(const uint8_t* encoded, int64_t count, float* out) {
    bool sound = true;
    int64_t begin = 0;
    for (; begin + kGroup <= count; begin += kGroup, encoded += kGroupBytes) {
        __m512 scale;
        sound &= read_scale(encoded, &scale);
        for (int64_t i = 0; i < kGroup; i += kStep) {
            _mm512_storeu_ps(out + begin + i, values_of(encoded + 4 + i, scale));
        }
    }
    return begin == count ? sound : portable::decode(kInt8, encoded, count - begin, out + begin) && sound;
}

BLOOMERY_WIDE bool accumulate(const uint8_t* encoded, int64_t count, float* sum) {
    bool sound = true;
    int64_t begin = 0;
    for (; begin + kGroup <= count; begin += kGroup, encoded += kGroupBytes) {
        __m512 scale;
        sound &= read_scale(encoded, &scale);
        for (int64_t i = 0; i < kGroup; i += kStep) {
            float* to = sum + begin + i;
            if (i % kAtOnce == 0) ask_for(to);
            _mm512_storeu_ps(to, _mm512_add_ps(values_of(encoded + 4 + i, scale), _mm512_loadu_ps(to)));
        }
    }
    return begin == count ? sound : portable::accumulate(kInt8, encoded, count - begin, sum + begin) && sound;
}

}  // namespace bloomery::wide
#endif
