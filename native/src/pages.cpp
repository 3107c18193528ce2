// The sum of a page is NH, the multiply-add hash of UMAC (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: fast and
// secure message authentication", CRYPTO 1999; RFC 4418), brought from 64 to 32 bits by the multiply-shift hash of
// Dietzfelbinger, Hagerup, Katajainen and Penttonen ("A reliable randomized algorithm for the closest-pair problem",
// 1997). Two different pages have the same sum with a probability of at most 3 in 2^32, whatever they contain. The keys
// are constants, so the sums detect damage but not forgery.
#include "pages.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_VECTORS 1
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's intrinsics use undefined registers on purpose
#include <immintrin.h>
#else
#define HAS_VECTORS 0
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "sums count words as they lie in memory");

namespace {

using bloomery::kPageBytes;

constexpr int64_t kWords = kPageBytes / 8;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;

// SplitMix64 (Steele, Lea and Flood, 2014), with a seed of 0.
constexpr std::array<uint64_t, kWords> made_keys() {
    std::array<uint64_t, kWords> keys{};
    uint64_t state = 0;
    for (uint64_t& key : keys) {
        state += 0x9E3779B97F4A7C15u;
        uint64_t mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
        key = mixed ^ (mixed >> 31);
    }
    return keys;
}

alignas(64) constexpr std::array<uint64_t, kWords> kKeys = made_keys();

uint64_t nh_plain(const char* page) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < kWords; ++i) {
        uint64_t word;
        std::memcpy(&word, page + 8 * i, 8);
        const uint64_t key = kKeys[static_cast<size_t>(i)];
        const uint32_t low = static_cast<uint32_t>(word) + static_cast<uint32_t>(key);
        const uint32_t high = static_cast<uint32_t>(word >> 32) + static_cast<uint32_t>(key >> 32);
        sum += static_cast<uint64_t>(low) * high;
    }
    return sum;
}

#if HAS_VECTORS

__attribute__((target("avx2"))) uint64_t nh_avx2(const char* page) {
    constexpr int64_t kAtOnce = 4, kVectors = kPageBytes / 32;
    __m256i sums[kAtOnce] = {};
    const auto* from = reinterpret_cast<const __m256i*>(page);
    const auto* keys = reinterpret_cast<const __m256i*>(kKeys.data());
    for (int64_t i = 0; i < kVectors; i += kAtOnce) {
        for (int64_t j = 0; j < kAtOnce; ++j) {
            const __m256i words = _mm256_add_epi32(_mm256_loadu_si256(from + i + j), _mm256_load_si256(keys + i + j));
            sums[j] = _mm256_add_epi64(sums[j], _mm256_mul_epu32(words, _mm256_srli_epi64(words, 32)));
        }
    }
    alignas(32) uint64_t lanes[4];
    const __m256i left = _mm256_add_epi64(sums[0], sums[1]), right = _mm256_add_epi64(sums[2], sums[3]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(left, right));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx512f"))) uint64_t nh_avx512(const char* page) {
    constexpr int64_t kAtOnce = 4, kVectors = kPageBytes / 64;
    __m512i sums[kAtOnce] = {};
    for (int64_t i = 0; i < kVectors; i += kAtOnce) {
        for (int64_t j = 0; j < kAtOnce; ++j) {
            const __m512i words = _mm512_add_epi32(_mm512_loadu_si512(page + 64 * (i + j)),
                                                   _mm512_load_si512(kKeys.data() + 8 * (i + j)));
            sums[j] = _mm512_add_epi64(sums[j], _mm512_mul_epu32(words, _mm512_srli_epi64(words, 32)));
        }
    }
    const __m512i left = _mm512_add_epi64(sums[0], sums[1]), right = _mm512_add_epi64(sums[2], sums[3]);
    alignas(64) uint64_t lanes[8];
    _mm512_store_si512(lanes, _mm512_add_epi64(left, right));
    uint64_t sum = 0;
    for (const uint64_t lane : lanes) sum += lane;
    return sum;
}

#endif

typedef uint64_t Nh(const char* page);

Nh* nh_of(int32_t instructions) {
#if HAS_VECTORS
    if (instructions >= 2 && __builtin_cpu_supports("avx512f")) return nh_avx512;
    if (instructions >= 1 && __builtin_cpu_supports("avx2")) return nh_avx2;
#endif
    (void)instructions;
    return nh_plain;
}

Nh* quickest() {
    static Nh* const nh = nh_of(2);
    return nh;
}

// content: the first `bytes` bytes of a page; the rest of the page counts as zeros.
uint32_t sum_of(Nh* nh, const char* content, int64_t bytes) {
    alignas(64) char filled[kPageBytes];
    if (bytes < kPageBytes) {
        std::memset(filled, 0, sizeof(filled));
        std::memcpy(filled, content, static_cast<size_t>(bytes));
        content = filled;
    }
    return static_cast<uint32_t>((nh(content) * kOdd) >> 32);
}

}  // namespace

bool bloomery::check_page(const bloomery_pages& pages, int64_t page) {
    const int64_t begin = page * kPageBytes, left = pages.bytes - begin;
    const char* content = static_cast<const char*>(pages.content) + begin;
    if (sum_of(quickest(), content, left < kPageBytes ? left : kPageBytes) != pages.sums[page]) return false;
    __atomic_fetch_or(pages.checked + page / 64, uint64_t{1} << (page % 64), __ATOMIC_RELAXED);
    return true;
}

int32_t bloomery_page_sums(const void* content, int64_t bytes, int32_t instructions, uint32_t* sums) {
    if (bytes < 0 || instructions < 0) return -1;
    Nh* const nh = nh_of(instructions);
    for (int64_t begin = 0; begin < bytes; begin += kPageBytes) {
        const int64_t left = bytes - begin;
        *sums++ = sum_of(nh, static_cast<const char*>(content) + begin, left < kPageBytes ? left : kPageBytes);
    }
    return 0;
}

int32_t bloomery_check_pages(const bloomery_pages* pages, int64_t count, const int64_t* begins, const int64_t* ends) {
    for (int64_t i = 0; i < count; ++i) {
        if (begins[i] < 0 || ends[i] < begins[i] || ends[i] > pages->bytes) return -2;
        if (!bloomery::check_pages(*pages, begins[i], ends[i] - begins[i])) return -3;
    }
    return 0;
}
