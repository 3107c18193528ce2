// Sums of the pages of token files, and the check of a page when it is read for the first time.
#pragma once

#include "bloomery.h"

namespace bloomery {

constexpr int64_t kPageBytes = 4096;

// Compares a page with its sum, and marks it as checked if they agree.
bool check_page(const bloomery_pages& pages, int64_t page);

// Returns false if a page of these bytes is not what was written. Several threads may check the same page at a time.
inline bool check_pages(const bloomery_pages& pages, int64_t begin, int64_t size) {
    if (size <= 0) return true;
    for (int64_t page = begin / kPageBytes; page <= (begin + size - 1) / kPageBytes; ++page) {
        const uint64_t word = __atomic_load_n(pages.checked + page / 64, __ATOMIC_RELAXED);
        if (!(word >> (page % 64) & 1) && !check_page(pages, page)) return false;
    }
    return true;
}

}  // namespace bloomery
