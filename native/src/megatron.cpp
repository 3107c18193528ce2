// Megatron's order of samples: numpy's legacy shuffle, cumulative lengths in that order, and the greedy blend.
#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#include "bloomery.h"

namespace {

constexpr int kWords = 624, kShift = 397;
constexpr int64_t kAhead = 64;

// MT19937 (Matsumoto & Nishimura 1998); it generates a whole state at a time.
class Twister {
   public:
    Twister(uint32_t* state, int32_t* place) : state_(state), place_(place) {}

    uint32_t next() {
        if (*place_ >= kWords) renew();
        uint32_t word = state_[(*place_)++];
        word ^= word >> 11;
        word ^= (word << 7) & 0x9D2C5680u;
        word ^= (word << 15) & 0xEFC60000u;
        return word ^ (word >> 18);
    }

    // Returns a uniform number in [0, most], by masking and rejection: numpy's random_interval.
    uint32_t up_to(uint32_t most, uint32_t mask) {
        uint32_t value = next() & mask;
        while (value > most) value = next() & mask;
        return value;
    }

   private:
    static uint32_t twisted(uint32_t upper, uint32_t lower) {
        const uint32_t joined = (upper & 0x80000000u) | (lower & 0x7FFFFFFFu);
        return (joined >> 1) ^ ((0u - (joined & 1u)) & 0x9908B0DFu);
    }

    void renew() {
        int i = 0;
        for (; i < kWords - kShift; ++i) state_[i] = state_[i + kShift] ^ twisted(state_[i], state_[i + 1]);
        for (; i < kWords - 1; ++i) state_[i] = state_[i + kShift - kWords] ^ twisted(state_[i], state_[i + 1]);
        state_[kWords - 1] = state_[kShift - 1] ^ twisted(state_[kWords - 1], state_[0]);
        *place_ = 0;
    }

    uint32_t* state_;
    int32_t* place_;
};

uint32_t mask_of(uint32_t most) {
    for (int shift = 1; shift < 32; shift *= 2) most |= most >> shift;
    return most;
}

}  // namespace

// The draws do not depend on what is shuffled. They are made ahead, so that the cache lines to be swapped can be
// prefetched.
int32_t bloomery_shuffle(uint32_t* state, int32_t* place, uint32_t* values, int64_t count) {
    if (count > (int64_t{1} << 32)) return -1;
    Twister twister(state, place);
    uint32_t drawn[kAhead];
    int64_t top = count - 1;
    while (top > 0) {
        const int64_t size = std::min(kAhead, top);
        for (int64_t i = 0; i < size; ++i) {
            const uint32_t most = static_cast<uint32_t>(top - i);
            drawn[i] = twister.up_to(most, mask_of(most));
            __builtin_prefetch(values + drawn[i], 1);
        }
        for (int64_t i = 0; i < size; ++i) std::swap(values[top - i], values[drawn[i]]);
        top -= size;
    }
    return 0;
}

int32_t bloomery_cumulate(const void* lengths, const uint32_t* order, int64_t count, int64_t* ends) {
    const char* base = static_cast<const char*>(lengths);  // unaligned, as in the file
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) __builtin_prefetch(base + 4 * static_cast<int64_t>(order[i + kAhead]), 0);
        int32_t length;
        std::memcpy(&length, base + 4 * static_cast<int64_t>(order[i]), 4);
        total += length;
        ends[i] = total;
    }
    return 0;
}

int32_t bloomery_blend(int64_t n, const double* weights, int64_t first, int64_t count, int64_t* counts,
                       uint16_t* datasets) try {
    if (n < 1 || n > 65536) return -1;
    std::vector<double> given(counts, counts + n);  // exact below 2^53
    std::vector<double> wanting(static_cast<size_t>(n));
    for (int64_t i = 0; i < count; ++i) {
        const double at = static_cast<double>(std::max<int64_t>(first + i, 1));
        for (int64_t d = 0; d < n; ++d) wanting[d] = weights[d] * at - given[d];
        int64_t best = 0;
        for (int64_t d = 1; d < n; ++d) best = wanting[d] > wanting[best] ? d : best;
        datasets[i] = static_cast<uint16_t>(best);
        given[best] += 1.0;
    }
    for (int64_t d = 0; d < n; ++d) counts[d] = static_cast<int64_t>(given[d]);
    return 0;
} catch (const std::exception&) {  // no memory
    return -4;
}
