// Reads samples from mapped token files: copies, widens and checks them in one pass, and prefetches pages.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <vector>

#include "bloomery.h"
#include "pages.h"
#include "wide.h"

#ifdef BLOOMERY_WIDE
// GCC 12 warns of its own intrinsics, which use undefined registers on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#endif

namespace {

struct Bytes {  // a range of bytes of the file
    int64_t begin;
    int64_t size;
};

int width_of(int32_t type) {
    switch (type) {
        case 1: case 2: return 1;
        case 3: case 8: return 2;
        case 4: return 4;
        case 5: return 8;
        default: return 0;
    }
}

// Prefetches pages (madvise) during one call of the library. It does not where the pages are in memory already, because
// one madvise costs more than reading a sample. A few samples (mincore) decide whether the pages are in memory. If page
// faults show that they were not, the next kDoubt calls prefetch without looking. That happens with files of other
// users, about which mincore says nothing.
class Asking {
  public:
    Asking(const char* base, bool wanted) : base_(base), wanted_(wanted) {}

    // range(row): returns the bytes of a sample in the file, or a part of them.
    template <typename Range>
    void judge(int64_t rows, Range range) {
        if (!wanted_ || doubted_.load(std::memory_order_relaxed) > 0) return;
        if (relied_.fetch_sub(1, std::memory_order_relaxed) <= 0) {
            for (int64_t probe = 0; probe < kProbes; ++probe) {
                if (!in_memory(range(probe * (rows - 1) / (kProbes - 1)))) return relied_.store(0, std::memory_order_relaxed);
            }
            relied_.store(kReliance, std::memory_order_relaxed);
        }
        trusted_ = true;
        faults_ = faults();
    }

    void ask(const Bytes& bytes) const {
        if (!wanted_ || trusted_) return;
        const uintptr_t first = page_of(bytes.begin);
        madvise(reinterpret_cast<void*>(first), address(bytes.begin + bytes.size) - first, MADV_WILLNEED);  // if it fails, pages come later
    }

    ~Asking() {
        if (trusted_ && faults() > faults_) {
            doubted_.store(kDoubt, std::memory_order_relaxed);
            relied_.store(0, std::memory_order_relaxed);
        } else if (wanted_ && !trusted_ && doubted_.load(std::memory_order_relaxed) > 0) {
            doubted_.fetch_sub(1, std::memory_order_relaxed);
        }
    }

  private:
    static constexpr int64_t kProbes = 4, kReliance = 16, kDoubt = 256;
    static constexpr uintptr_t kPages = 32;
    static inline std::atomic<int64_t> relied_{0};   // how many more calls rely on the pages being in memory
    static inline std::atomic<int64_t> doubted_{0};  // how many more calls prefetch without looking

    uintptr_t address(int64_t byte) const { return reinterpret_cast<uintptr_t>(base_) + static_cast<uintptr_t>(byte); }

    uintptr_t page_of(int64_t byte) const { return address(byte) & ~(page_size() - 1); }

    static uintptr_t page_size() {
        static const uintptr_t size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        return size;
    }

    // Whether the first kPages pages of the bytes are in memory.
    bool in_memory(const Bytes& bytes) const {
        unsigned char told[kPages] = {};
        const uintptr_t first = page_of(bytes.begin), end = address(bytes.begin + bytes.size);
        const uintptr_t pages = std::min((end - first + page_size() - 1) / page_size(), kPages);
        if (mincore(reinterpret_cast<void*>(first), pages * page_size(), told) != 0) return false;
        return std::all_of(told, told + pages, [](unsigned char page) { return (page & 1) != 0; });
    }

    static int64_t faults() {
        rusage used{};
        getrusage(RUSAGE_THREAD, &used);
        return used.ru_majflt;
    }

    const char* base_;
    const bool wanted_;
    bool trusted_ = false;
    int64_t faults_ = 0;
};

// Copies tokens as 32-bit numbers and returns the largest; a negative token counts as a huge unsigned one. Each vector
// that is written fills one cache line, for a vector across two lines takes twice as long. So the first few tokens are
// copied apart, up to the start of a line. The loop prefetches the lines that it writes next, and the bytes from `next`
// on that the next call reads, because the hardware's prefetcher stops at the end of a page.
template <typename Token>
BLOOMERY_CLONES uint64_t widened(const char* source, int64_t count, const char* next, int32_t* out) {
    constexpr int64_t kWidth = sizeof(Token), kLanes = 16, kAhead = 16 * kLanes;
    typedef Token Narrow __attribute__((vector_size(kLanes * kWidth)));
    typedef int32_t Line __attribute__((vector_size(kLanes * sizeof *out)));
    Narrow high{}, low{};
    const auto take = [&](int64_t lanes) {
        Narrow tokens{};
        std::memcpy(&tokens, source, static_cast<size_t>(lanes * kWidth));
        high = tokens > high ? tokens : high;
        low = tokens < low ? tokens : low;
        const Line line = __builtin_convertvector(tokens, Line);
        std::memcpy(out, &line, static_cast<size_t>(lanes) * sizeof *out);
        count -= lanes, source += lanes * kWidth, out += lanes;
    };
    const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) / sizeof *out) % kLanes;
    if (past) take(std::min(count, kLanes - past));
    for (; count >= kLanes; next += kLanes * kWidth) {
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(out + kAhead, 1, 3);
        take(kLanes);
    }
    if (count) take(count);
    Token highest = 0, lowest = 0;
    for (int64_t i = 0; i < kLanes; ++i) highest = std::max<Token>(highest, high[i]), lowest = std::min<Token>(lowest, low[i]);
    return lowest < 0 ? ~uint64_t{0} : static_cast<uint64_t>(highest);
}

#ifdef BLOOMERY_WIDE

// What `widened` does, for the types that most files have. One store of AVX-512 writes a whole line, so the
// line's old content need not be fetched; a prefetch would fetch it. prefetch_ends alone prefetches the source.
template <typename Token>
BLOOMERY_WIDE uint64_t widened_by_lines(const char* source, int64_t count, int32_t* out) {
    constexpr int64_t kWidth = sizeof(Token), kLanes = 16;
    static_assert(kWidth == 2 || kWidth == 4);
    __m512i high = _mm512_setzero_si512();
    const auto take = [&](int64_t lanes) BLOOMERY_WIDE {
        const auto mask = static_cast<__mmask16>((1u << lanes) - 1);
        __m512i tokens;
        if constexpr (kWidth == 2) {
            const __m512i narrow = _mm512_maskz_loadu_epi16(mask, source);
            tokens = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(narrow));
        } else {
            tokens = _mm512_maskz_loadu_epi32(mask, source);
        }
        high = _mm512_max_epu32(high, tokens);
        _mm512_mask_storeu_epi32(out, mask, tokens);
        count -= lanes, source += lanes * kWidth, out += lanes;
    };
    const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) / sizeof *out) % kLanes;
    if (past) take(std::min(count, kLanes - past));
    while (count >= kLanes) take(kLanes);
    if (count) take(count);
    const uint32_t largest = _mm512_reduce_max_epu32(high);
    return largest >> 31 ? ~uint64_t{0} : largest;  // a negative token
}

#endif

uint64_t widen(const char* source, int32_t type, int64_t count, const char* next, int32_t* out) {
#ifdef BLOOMERY_WIDE
    if (bloomery::has_wide() && type == 8) return widened_by_lines<uint16_t>(source, count, out);
    if (bloomery::has_wide() && type == 4) return widened_by_lines<int32_t>(source, count, out);
#endif
    switch (type) {
        case 1: return widened<uint8_t>(source, count, next, out);
        case 2: return widened<int8_t>(source, count, next, out);
        case 3: return widened<int16_t>(source, count, next, out);
        case 4: return widened<int32_t>(source, count, next, out);
        case 5: return widened<int64_t>(source, count, next, out);
        default: return widened<uint16_t>(source, count, next, out);
    }
}

// Prefetches the ends of a sample that is read soon. The processor then knows the addresses of its pages in
// memory, and its own prefetcher goes on from the first two lines.
void prefetch_ends(const char* sample, int64_t bytes) {
    for (const int64_t at : {int64_t{0}, int64_t{64}, bytes - 1}) __builtin_prefetch(sample + at, 0, 2);
}

// Finds the byte ranges of the sample that begins at token `start` of a row of documents. Returns false if the sample
// leaves the row.
bool find_pieces(int64_t start, int64_t tokens, int64_t width, const void* pointers, const uint32_t* order,
                 const int64_t* ends, int64_t count, std::vector<Bytes>& found) {
    found.clear();
    if (start < 0) return false;
    int64_t place = std::upper_bound(ends, ends + count, start) - ends, at = start;
    for (; tokens > 0; ++place) {
        if (place >= count) return false;
        const int64_t taken = std::min(tokens, ends[place] - at);
        if (taken == 0) continue;
        int64_t pointer;
        std::memcpy(&pointer, static_cast<const char*>(pointers) + 8 * static_cast<int64_t>(order[place]), 8);
        const int64_t begin = place ? ends[place - 1] : 0;
        found.push_back({pointer + (at - begin) * width, taken * width});
        at += taken;
        tokens -= taken;
    }
    return true;
}

}  // namespace

int32_t bloomery_gather(const void* tokens, int32_t type, int64_t size, int64_t rows, const int64_t* starts,
                        const int64_t* places, int64_t count, int64_t ahead, const bloomery_pages* pages, int32_t* out,
                        uint64_t* largest) {
    const char* base = static_cast<const char*>(tokens);
    const int64_t width = width_of(type);
    if (!width) return -1;
    if (rows <= 0) return 0;
    for (int64_t row = 0; row < rows; ++row) {
        if (starts[row] < 0 || count > size - starts[row]) return -2;
    }
    const auto bytes = [=](int64_t row) { return Bytes{starts[row] * width, count * width}; };
    const int64_t first = pages ? base - static_cast<const char*>(pages->content) : 0;  // the byte of the file at which the tokens begin
    Asking asking(base, ahead > 0);
    asking.judge(rows, bytes);
    for (int64_t row = 0; row < std::min(ahead, rows); ++row) asking.ask(bytes(row));
    for (int64_t row = 0; row < rows; ++row) {
        if (row + ahead < rows) asking.ask(bytes(row + ahead));
        const Bytes later = bytes(std::min(row + 2, rows - 1));
        prefetch_ends(base + later.begin, later.size);
        if (pages) {
            bloomery::prefetch_last_page(*pages, first + later.begin, later.size);
            if (!bloomery::check_pages(*pages, first + bytes(row).begin, count * width)) return -3;
        }
        const char* next = base + bytes(std::min(row + 1, rows - 1)).begin;
        largest[row] = widen(base + bytes(row).begin, type, count, next, out + places[row] * count);
    }
    return 0;
}

int32_t bloomery_gather_documents(const void* tokens, int32_t type, int64_t rows, const int64_t* starts,
                                  const int64_t* places, int64_t count, int64_t ahead,
                                  const bloomery_pages* pages, const void* pointers, const uint32_t* order,
                                  const int64_t* ends, int64_t documents, int32_t* out, uint64_t* largest) try {
    const char* base = static_cast<const char*>(tokens);
    const int64_t width = width_of(type), window = std::min(std::max<int64_t>(ahead, 1), rows);
    if (!width) return -1;
    if (rows <= 0) return 0;
    std::vector<std::vector<Bytes>> found(static_cast<size_t>(window));
    const auto pieces = [&](int64_t row) -> std::vector<Bytes>& { return found[static_cast<size_t>(row % window)]; };
    const auto find = [&](int64_t row) {
        return find_pieces(starts[row], count, width, pointers, order, ends, documents, pieces(row));
    };
    Asking asking(base, ahead > 0);
    for (int64_t row = 0; row < window; ++row) {
        if (!find(row)) return -2;
    }
    asking.judge(window, [&](int64_t row) { return pieces(row).front(); });
    for (int64_t row = 0; row < window; ++row) {
        for (const Bytes& piece : pieces(row)) asking.ask(piece);
    }
    for (int64_t row = 0; row < rows; ++row) {
        int32_t* to = out + places[row] * count;
        uint64_t high = 0;
        const std::vector<Bytes>& here = pieces(row);
        const std::vector<Bytes>& after = row + 1 < rows && window > 1 ? pieces(row + 1) : here;
        for (size_t i = 0; i < here.size(); ++i) {
            if (pages) {
                if (here[i].begin < 0 || here[i].begin + here[i].size > pages->bytes) return -2;
                if (!bloomery::check_pages(*pages, here[i].begin, here[i].size)) return -3;
            }
            const int64_t taken = here[i].size / width;
            const Bytes& next = after[std::min(i, after.size() - 1)];
            prefetch_ends(base + next.begin, next.size);
            high = std::max(high, widen(base + here[i].begin, type, taken, base + next.begin, to));
            to += taken;
        }
        largest[row] = high;
        if (row + window >= rows) continue;
        if (!find(row + window)) return -2;
        for (const Bytes& piece : pieces(row + window)) asking.ask(piece);
    }
    return 0;
} catch (const std::exception&) {  // no memory
    return -4;
}
