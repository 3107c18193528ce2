// Sums of the pages of token files, and the check of a page when it is read for the first time.
#pragma once

#include "bloomery.h"

namespace bloomery {

constexpr int64_t kPageBytes = 4096;

// Compares a page with its sum, and marks it as checked if they agree.
bool check_page(const bloomery_pages& pages, int64_t page);

inline bool is_checked(const bloomery_pages& pages, int64_t page) {
    return __atomic_load_n(pages.checked + page / 64, __ATOMIC_RELAXED) >> (page % 64) & 1;
}

// Prefetches the beginning of the last page of these bytes if check_pages will read it. The whole page is
// summed, though the bytes may end soon after its beginning.
inline void prefetch_last_page(const bloomery_pages& pages, int64_t begin, int64_t size) {
    constexpr int64_t kLine = 64, kLines = 4;
    if (size <= 0) return;
    const int64_t page = (begin + size - 1) / kPageBytes;
    if (is_checked(pages, page)) return;
    const char* content = static_cast<const char*>(pages.content) + page * kPageBytes;
    for (int64_t line = 0; line < kLines; ++line) __builtin_prefetch(content + line * kLine, 0, 2);
}

// Returns false if a page of these bytes is not what was written. Several threads may check the same page at a time.
inline bool check_pages(const bloomery_pages& pages, int64_t begin, int64_t size) {
    if (size <= 0) return true;
    for (int64_t page = begin / kPageBytes; page <= (begin + size - 1) / kPageBytes; ++page) {
        if (!is_checked(pages, page) && !check_page(pages, page)) return false;
    }
    return true;
}

}  // namespace bloomery
