// The `bloomery` order of samples: keyed permutations, exact quotas, blocks. bloomery/data/order.py and mixture.py have
// the same arithmetic in NumPy, with its reasons.
#include <algorithm>
#include <exception>
#include <vector>

#include "bloomery.h"

namespace {

constexpr int kMostRounds = 16;
constexpr int kChunk = 512;
constexpr int kShareBits = 46;
constexpr int64_t kOne = int64_t{1} << kShareBits;

uint64_t mix(uint64_t state) {
    state += 0x9E3779B97F4A7C15u;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

struct Network {
    int low_bits;
    uint32_t low_mask, high_mask;
    int rounds;
    uint32_t keys[kMostRounds];

    explicit Network(int64_t n) {
        int bits = 2;
        while (bits < 63 && (uint64_t{1} << bits) < static_cast<uint64_t>(n)) ++bits;
        low_bits = bits / 2;
        low_mask = static_cast<uint32_t>((uint64_t{1} << low_bits) - 1);
        high_mask = static_cast<uint32_t>((uint64_t{1} << (bits - low_bits)) - 1);
        rounds = bits <= 12 ? 16 : 6;
    }

    void take(uint64_t key) {
        for (int turn = 0; turn < rounds; ++turn) keys[turn] = static_cast<uint32_t>(mix(key + turn + 1) >> 32);
    }
};

inline uint32_t scramble(uint32_t half, uint32_t key) {
    uint32_t mixed = (half ^ key) * 0x9E3779B1u;
    mixed ^= mixed >> 15;
    mixed *= 0x85EBCA77u;
    mixed ^= mixed >> 13;
    return mixed;
}

inline uint64_t feistel(uint64_t value, const Network& network) {
    uint32_t high = static_cast<uint32_t>(value >> network.low_bits);
    uint32_t low = static_cast<uint32_t>(value) & network.low_mask;
    for (int turn = 0; turn < network.rounds; turn += 2) {
        high ^= scramble(low, network.keys[turn]) & network.high_mask;
        low ^= scramble(high, network.keys[turn + 1]) & network.low_mask;
    }
    return (uint64_t{high} << network.low_bits) | low;
}

// The halves of the values lie in separate arrays, so that vectors of eight or sixteen values pass the network at once.
BLOOMERY_CLONES
void feistel_many(const int64_t* index, int64_t count, const Network& network, int64_t* out) {
    uint32_t high[kChunk], low[kChunk];
    for (int64_t begin = 0; begin < count; begin += kChunk) {
        const int size = static_cast<int>(std::min<int64_t>(kChunk, count - begin));
        for (int i = 0; i < size; ++i) {
            const uint64_t value = static_cast<uint64_t>(index[begin + i]);
            high[i] = static_cast<uint32_t>(value >> network.low_bits);
            low[i] = static_cast<uint32_t>(value) & network.low_mask;
        }
        for (int turn = 0; turn < network.rounds; turn += 2) {
            const uint32_t first = network.keys[turn], second = network.keys[turn + 1];
            for (int i = 0; i < size; ++i) {
                high[i] ^= scramble(low[i], first) & network.high_mask;
                low[i] ^= scramble(high[i], second) & network.low_mask;
            }
        }
        for (int i = 0; i < size; ++i) {
            out[begin + i] = static_cast<int64_t>((uint64_t{high[i]} << network.low_bits) | low[i]);
        }
    }
}

constexpr int kLaneRounds = 6;

// Values that pass networks of their own side by side, in six rounds. A lane whose masks are 0 keeps its value.
struct Lanes {
    uint32_t high[kChunk], low[kChunk], high_mask[kChunk], low_mask[kChunk];
    int32_t low_bits[kChunk];
    uint32_t keys[kLaneRounds][kChunk];

    void enter(int lane, uint64_t value, const Network& network) {
        high[lane] = static_cast<uint32_t>(value >> network.low_bits);
        low[lane] = static_cast<uint32_t>(value) & network.low_mask;
        high_mask[lane] = network.high_mask;
        low_mask[lane] = network.low_mask;
        low_bits[lane] = network.low_bits;
        for (int turn = 0; turn < kLaneRounds; ++turn) keys[turn][lane] = network.keys[turn];
    }

    void leave(int lane, uint64_t value) {
        high[lane] = 0;
        low[lane] = static_cast<uint32_t>(value);  // the domain has at most 2^12 values
        high_mask[lane] = low_mask[lane] = 0;
        low_bits[lane] = 0;
    }

    // The network of one lane, which `enter` has set.
    Network network(int lane) const {
        Network one(1);
        one.low_bits = low_bits[lane], one.rounds = kLaneRounds;
        one.low_mask = low_mask[lane], one.high_mask = high_mask[lane];
        for (int turn = 0; turn < kLaneRounds; ++turn) one.keys[turn] = keys[turn][lane];
        return one;
    }
};

BLOOMERY_CLONES
void through_lanes(Lanes& lanes, int size, int64_t* out) {
    for (int turn = 0; turn < kLaneRounds; turn += 2) {
        for (int i = 0; i < size; ++i) {
            lanes.high[i] ^= scramble(lanes.low[i], lanes.keys[turn][i]) & lanes.high_mask[i];
            lanes.low[i] ^= scramble(lanes.high[i], lanes.keys[turn + 1][i]) & lanes.low_mask[i];
        }
    }
    for (int i = 0; i < size; ++i) {
        out[i] = static_cast<int64_t>((uint64_t{lanes.high[i]} << lanes.low_bits[i]) | lanes.low[i]);
    }
}

inline int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

struct Claim {
    int64_t deadline, group_deadline;
    int32_t dataset;
    bool overlaps;

    bool operator<(const Claim& other) const {
        if (deadline != other.deadline) return deadline < other.deadline;
        if (overlaps != other.overlaps) return overlaps;
        if (group_deadline != other.group_deadline) return group_deadline > other.group_deadline;
        return dataset < other.dataset;
    }
};

}  // namespace

int32_t bloomery_permute(const int64_t* index, int64_t count, int64_t n, const uint64_t* keys, int64_t key_count,
                         int64_t* out) {
    Network network(n);
    if (key_count == 1) {
        network.take(keys[0]);
        feistel_many(index, count, network, out);
        for (int64_t i = 0; i < count; ++i) {
            while (out[i] >= n) out[i] = static_cast<int64_t>(feistel(static_cast<uint64_t>(out[i]), network));
        }
        return 0;
    }
    for (int64_t i = 0; i < count; ++i) {
        network.take(keys[i]);
        uint64_t value = static_cast<uint64_t>(index[i]);
        do {
            value = feistel(value, network);
        } while (value >= static_cast<uint64_t>(n));
        out[i] = static_cast<int64_t>(value);
    }
    return 0;
}

int32_t bloomery_walk_quotas(int64_t n, const int64_t* steps, int64_t chairs, int64_t blocks, int64_t* whole,
                             int64_t* residue, int64_t* ahead) try {
    std::vector<Claim> claims;
    claims.reserve(static_cast<size_t>(n));
    for (int64_t block = 0; block < blocks; ++block) {
        claims.clear();
        for (int64_t i = 0; i < n; ++i) {
            const int64_t step = steps[i];
            if (step == 0 || residue[i] + step <= ahead[i] * kOne) continue;
            Claim claim{};
            claim.dataset = static_cast<int32_t>(i);
            const int64_t wanted = (ahead[i] + 1) * kOne - residue[i];
            claim.deadline = divided_up(wanted, step);
            claim.overlaps = claim.deadline * step > wanted;
            if (2 * step >= kOne) {
                const int64_t rest = kOne - step, begun = (kOne - residue[i]) % kOne;
                const int64_t pauses = divided_up(begun + claim.deadline * rest, kOne);
                claim.group_deadline = divided_up(pauses * kOne - begun, rest);
            }
            claims.push_back(claim);
        }
        if (static_cast<int64_t>(claims.size()) < chairs) return -1;
        if (chairs < static_cast<int64_t>(claims.size())) {
            std::nth_element(claims.begin(), claims.begin() + chairs, claims.end());
        }
        for (int64_t turn = 0; turn < chairs; ++turn) ahead[claims[static_cast<size_t>(turn)].dataset] += 1;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t due = residue[i] + steps[i];
            const int64_t gained = due >> kShareBits;
            residue[i] = due & (kOne - 1);
            whole[i] += gained;
            ahead[i] -= gained;
        }
    }
    return 0;
} catch (const std::exception&) {  // no memory
    return -4;
}

int32_t bloomery_mix_block(int64_t n, const int64_t* quotas, const int64_t* first_turns, int64_t size, uint64_t key,
                           int32_t* datasets, int64_t* turns) try {
    std::vector<int32_t> owner(static_cast<size_t>(size));
    std::vector<int64_t> next(first_turns, first_turns + n);
    int64_t filled = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (quotas[i] < 0 || filled + quotas[i] > size) return -1;
        std::fill_n(owner.begin() + filled, quotas[i], static_cast<int32_t>(i));
        filled += quotas[i];
    }
    if (filled != size) return -1;
    for (int64_t place = 0; place < size; ++place) turns[place] = place;
    bloomery_permute(turns, size, size, &key, 1, turns);
    for (int64_t place = 0; place < size; ++place) {
        const int32_t dataset = owner[static_cast<size_t>(turns[place])];
        datasets[place] = dataset;
        turns[place] = next[static_cast<size_t>(dataset)]++;
    }
    return 0;
} catch (const std::exception&) {  // no memory
    return -4;
}

int32_t bloomery_windows(int64_t n, const int64_t* windows, uint64_t seed, uint64_t purpose, const int64_t* datasets,
                         const int64_t* turns, int64_t count, int64_t* out) try {
    struct Known {
        Network network{1};
        int64_t epoch = -1;
    };
    std::vector<Known> known(static_cast<size_t>(n));
    Lanes lanes;
    for (int64_t begin = 0; begin < count; begin += kChunk) {
        const int size = static_cast<int>(std::min<int64_t>(kChunk, count - begin));
        for (int i = 0; i < size; ++i) {
            const int64_t dataset = datasets[begin + i];
            if (dataset < 0 || dataset >= n) return -1;
            const uint64_t turn = static_cast<uint64_t>(turns[begin + i]), held = static_cast<uint64_t>(windows[dataset]);
            const int64_t epoch = static_cast<int64_t>(turn / held);
            Known& one = known[static_cast<size_t>(dataset)];
            if (one.epoch != epoch) {
                uint64_t key = mix(seed);
                for (const uint64_t part : {purpose, static_cast<uint64_t>(dataset), static_cast<uint64_t>(epoch)}) {
                    key = mix(key ^ mix(part));
                }
                one.network = Network(windows[dataset]);
                one.network.take(key);
                one.epoch = epoch;
            }
            uint64_t value = turn - static_cast<uint64_t>(epoch) * held;
            if (one.network.rounds > kLaneRounds) {  // the network of a small dataset has more rounds
                do {
                    value = feistel(value, one.network);
                } while (value >= held);
                lanes.leave(i, value);
            } else {
                lanes.enter(i, value, one.network);
            }
        }
        through_lanes(lanes, size, out + begin);
        for (int i = 0; i < size; ++i) {
            const uint64_t held = static_cast<uint64_t>(windows[datasets[begin + i]]);
            uint64_t value = static_cast<uint64_t>(out[begin + i]);
            if (value < held) continue;
            const Network network = lanes.network(i);
            while (value >= held) value = feistel(value, network);
            out[begin + i] = static_cast<int64_t>(value);
        }
    }
    return 0;
} catch (const std::exception&) {  // no memory
    return -4;
}
