// Samples from mapped token files: copied, widened and checked in one pass, with pages asked for ahead.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bloomery.h"

namespace {

struct Piece {
    int64_t byte;    // in the file
    int64_t tokens;  // how many
};

struct Target {
    int64_t length;
    int64_t* inputs;
    int64_t* targets;
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

void ask_for(const char* base, int64_t byte, int64_t size) {
    static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(byte)) & ~(page - 1);
    const uintptr_t end = reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(byte + size);
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);  // advice: its failure costs time only
}

// Loads are from a local buffer, since a file's tokens may lie unaligned.
constexpr int64_t kChunk = 1024;

template <typename Token>
BLOOMERY_CLONES uint64_t widened(const char* source, int64_t count, int64_t* out) {
    uint64_t largest = 0;
    Token chunk[kChunk];
    for (int64_t begin = 0; begin < count; begin += kChunk) {
        const int64_t size = std::min(kChunk, count - begin);
        std::memcpy(chunk, source + begin * static_cast<int64_t>(sizeof(Token)), static_cast<size_t>(size) * sizeof(Token));
        Token high = 0, low = 0;
        for (int64_t i = 0; i < size; ++i) {
            high = std::max(high, chunk[i]);
            low = std::min(low, chunk[i]);
        }
        for (int64_t i = 0; i < size; ++i) out[begin + i] = static_cast<int64_t>(chunk[i]);
        largest = std::max(largest, low < 0 ? ~uint64_t{0} : static_cast<uint64_t>(high));
    }
    return largest;
}

uint64_t widen(const char* source, int32_t type, int64_t count, int64_t* out) {
    switch (type) {
        case 1: return widened<uint8_t>(source, count, out);
        case 2: return widened<int8_t>(source, count, out);
        case 3: return widened<int16_t>(source, count, out);
        case 4: return widened<int32_t>(source, count, out);
        case 5: return widened<int64_t>(source, count, out);
        default: return widened<uint16_t>(source, count, out);
    }
}

// Puts a piece at token `at` of a row of length + 1: token t is input t and target t - 1.
uint64_t put(const char* base, int32_t type, const Piece& piece, int64_t at, int64_t place, const Target& target) {
    const int64_t width = width_of(type);
    const char* source = base + piece.byte;
    const int64_t inputs = std::min(piece.tokens, target.length - at), skipped = at == 0 ? 1 : 0;
    uint64_t largest = 0;
    if (inputs > 0) largest = widen(source, type, inputs, target.inputs + place * target.length + at);
    if (piece.tokens > skipped) {
        largest = std::max(largest, widen(source + skipped * width, type, piece.tokens - skipped,
                                          target.targets + place * target.length + at + skipped - 1));
    }
    return largest;
}

// Where sample `start` of a row of documents lies. Returns false when the row ends before the sample does.
bool find_pieces(int64_t start, int64_t tokens, int64_t width, const void* pointers, const uint32_t* order,
                 const int64_t* ends, int64_t count, std::vector<Piece>& found) {
    found.clear();
    int64_t place = std::upper_bound(ends, ends + count, start) - ends, at = start;
    for (; tokens > 0; ++place) {
        if (place >= count) return false;
        const int64_t taken = std::min(tokens, ends[place] - at);
        if (taken == 0) continue;
        int64_t pointer;
        std::memcpy(&pointer, static_cast<const char*>(pointers) + 8 * static_cast<int64_t>(order[place]), 8);
        const int64_t begin = place ? ends[place - 1] : 0;
        found.push_back({pointer + (at - begin) * width, taken});
        at += taken;
        tokens -= taken;
    }
    return true;
}

}  // namespace

int32_t bloomery_gather(const void* tokens, int32_t type, int64_t rows, const int64_t* starts, const int64_t* places,
                        int64_t length, int64_t ahead, int64_t* inputs, int64_t* targets, uint64_t* largest) {
    const char* base = static_cast<const char*>(tokens);
    const int64_t width = width_of(type);
    if (!width) return -1;
    const Target target{length, inputs, targets};
    for (int64_t row = 0; row < std::min(ahead, rows); ++row) ask_for(base, starts[row] * width, (length + 1) * width);
    for (int64_t row = 0; row < rows; ++row) {
        if (ahead && row + ahead < rows) ask_for(base, starts[row + ahead] * width, (length + 1) * width);
        largest[places[row]] = put(base, type, {starts[row] * width, length + 1}, 0, places[row], target);
    }
    return 0;
}

int32_t bloomery_gather_documents(const void* tokens, int32_t type, int64_t rows, const int64_t* starts,
                                  const int64_t* places, int64_t length, int64_t ahead, const void* pointers,
                                  const uint32_t* order, const int64_t* ends, int64_t count, int64_t* inputs,
                                  int64_t* targets, uint64_t* largest) {
    const char* base = static_cast<const char*>(tokens);
    const int64_t width = width_of(type);
    if (!width) return -1;
    const Target target{length, inputs, targets};
    const int64_t window = std::max<int64_t>(ahead, 1);
    std::vector<std::vector<Piece>> found(static_cast<size_t>(window));
    for (int64_t row = 0; row < rows + window; ++row) {
        std::vector<Piece>& pieces = found[static_cast<size_t>(row % window)];
        if (row >= window) {  // what was found a window ago has been asked for, and is read now
            const int64_t place = places[row - window];
            int64_t at = 0;
            uint64_t high = 0;
            for (const Piece& piece : pieces) {
                high = std::max(high, put(base, type, piece, at, place, target));
                at += piece.tokens;
            }
            largest[place] = high;
        }
        if (row >= rows) continue;
        if (!find_pieces(starts[row], length + 1, width, pointers, order, ends, count, pieces)) return -2;
        if (!ahead) continue;
        for (const Piece& piece : pieces) ask_for(base, piece.byte, piece.tokens * width);
    }
    return 0;
}
