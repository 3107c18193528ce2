// A copy that leaves the caches to computing threads: stores bypass them, and several pages are read at once.
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bloomery.h"

namespace {

#if defined(__x86_64__)
constexpr int64_t kPage = 4096;
constexpr int64_t kPagesAtOnce = 4;  // the hardware prefetches each page separately, up to the page's end
constexpr int64_t kGroup = kPage * kPagesAtOnce;
constexpr int64_t kLine = 64;

// to: aligned to kLine. bytes: a multiple of kGroup.
__attribute__((target("avx512f"))) void stream_wide(char* to, const char* from, int64_t bytes) {
    for (int64_t group = 0; group < bytes; group += kGroup)
        for (int64_t line = 0; line < kPage; line += 2 * kLine)
            for (int64_t page = 0; page < kPagesAtOnce; ++page) {
                const char* source = from + group + page * kPage + line;
                char* target = to + group + page * kPage + line;
                _mm_prefetch(source + 4 * kLine, _MM_HINT_T0);
                _mm_prefetch(source + 5 * kLine, _MM_HINT_T0);
                const __m512i first = _mm512_loadu_si512(source);
                const __m512i second = _mm512_loadu_si512(source + kLine);
                _mm512_stream_si512(reinterpret_cast<__m512i*>(target), first);
                _mm512_stream_si512(reinterpret_cast<__m512i*>(target + kLine), second);
            }
    _mm_sfence();
}

void stream(char* to, const char* from, int64_t bytes) {
    for (int64_t group = 0; group < bytes; group += kGroup)
        for (int64_t line = 0; line < kPage; line += kLine)
            for (int64_t page = 0; page < kPagesAtOnce; ++page) {
                const char* source = from + group + page * kPage + line;
                char* target = to + group + page * kPage + line;
                _mm_prefetch(source + 4 * kLine, _MM_HINT_T0);
                for (int64_t part = 0; part < kLine; part += 16)
                    _mm_stream_si128(reinterpret_cast<__m128i*>(target + part),
                                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + part)));
            }
    _mm_sfence();
}
#endif

}  // namespace

void bloomery_stream_copy(void* to, const void* from, int64_t bytes) {
    char* target = static_cast<char*>(to);
    const char* source = static_cast<const char*>(from);
#if defined(__x86_64__)
    static const bool is_wide = __builtin_cpu_supports("avx512f");
    const int64_t lead = -reinterpret_cast<intptr_t>(target) & (kLine - 1);
    if (bytes >= lead + kGroup) {
        const int64_t whole = (bytes - lead) / kGroup * kGroup;
        std::memcpy(target, source, static_cast<size_t>(lead));
        (is_wide ? stream_wide : stream)(target + lead, source + lead, whole);
        target += lead + whole, source += lead + whole, bytes -= lead + whole;
    }
#endif
    std::memcpy(target, source, static_cast<size_t>(bytes));
}
