// Codecs between fp32 and the bytes that are sent. A block of int8 (512 values) or int4 (128) begins with its fp32 scale.
#include "quantise.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "bloomery.h"
#include "wide.h"

#define INLINE static inline __attribute__((always_inline))

namespace bloomery {
namespace {

typedef uint32_t __attribute__((may_alias)) Bits;

constexpr int64_t kInt4Block = 128;
// A float of this size has no fractional bits. Adding it to a value rounds the value to the nearest even integer,
// which is then in the lowest bits of the sum.
constexpr float kRounder = 12582912.0f;

INLINE uint32_t largest_of(const float* values, int64_t count) {
    const Bits* bits = reinterpret_cast<const Bits*>(values);
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<int32_t>(bits[i] & 0x7FFFFFFFu));
    return static_cast<uint32_t>(largest);
}

INLINE bool read_scale(const uint8_t* from, float* scale) {
    uint32_t bits;
    std::memcpy(&bits, from, 4);
    std::memcpy(scale, from, 4);
    return bits <= kLargestBits;  // the highest bit of a negative value is set
}

// --- Each codec has the functions bytes, encode, decode and add. `largest` is the largest magnitude of the group.

struct Fp32 {
    static constexpr int64_t kBytes = 4 * kGroup;
    INLINE int64_t bytes(int64_t count) { return 4 * count; }
    INLINE void encode(const float* values, int64_t count, uint32_t, uint8_t* to) {
        std::memcpy(to, values, static_cast<size_t>(4 * count));
    }
    INLINE bool decode(const uint8_t* from, int64_t count, float* out) {
        std::memcpy(out, from, static_cast<size_t>(4 * count));
        return largest_of(out, count) <= kLargestBits;
    }
    INLINE bool add(const uint8_t* from, int64_t count, float* sum) {
        float received[kGroup];
        const bool sound = decode(from, count, received);
        for (int64_t i = 0; i < count; ++i) sum[i] = received[i] + sum[i];
        return sound;
    }
};

struct Bf16 {
    static constexpr int64_t kBytes = 2 * kGroup;
    INLINE int64_t bytes(int64_t count) { return 2 * count; }
    INLINE void encode(const float* values, int64_t count, uint32_t, uint8_t* to) {
        const Bits* bits = reinterpret_cast<const Bits*>(values);
        uint16_t codes[kGroup];
        for (int64_t i = 0; i < count; ++i) {
            codes[i] = static_cast<uint16_t>((bits[i] + 0x7FFFu + ((bits[i] >> 16) & 1u)) >> 16);
        }
        std::memcpy(to, codes, static_cast<size_t>(2 * count));
    }
    INLINE bool decode(const uint8_t* from, int64_t count, float* out) {
        uint16_t codes[kGroup];
        std::memcpy(codes, from, static_cast<size_t>(2 * count));
        Bits* bits = reinterpret_cast<Bits*>(out);
        for (int64_t i = 0; i < count; ++i) bits[i] = static_cast<uint32_t>(codes[i]) << 16;
        return largest_of(out, count) <= kLargestBits;
    }
    INLINE bool add(const uint8_t* from, int64_t count, float* sum) {
        float received[kGroup];
        const bool sound = decode(from, count, received);
        for (int64_t i = 0; i < count; ++i) sum[i] = received[i] + sum[i];
        return sound;
    }
};

struct Int8 {
    static constexpr int64_t kBytes = 4 + kGroup;
    INLINE int64_t bytes(int64_t count) { return 4 + count; }
    INLINE void encode(const float* values, int64_t count, uint32_t largest, uint8_t* to) {
        const Scale scale = scale_for(largest, 127.0f);
        std::memcpy(to, &scale.divisor, 4);
        to += 4;
        for (int64_t i = 0; i < count; ++i) {
            const float moved = values[i] * scale.factor + kRounder;
            to[i] = static_cast<uint8_t>(reinterpret_cast<const Bits&>(moved));
        }
    }
    INLINE bool decode(const uint8_t* from, int64_t count, float* out) {
        float scale;
        const bool sound = read_scale(from, &scale);
        const int8_t* codes = reinterpret_cast<const int8_t*>(from + 4);
        for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(codes[i]) * scale;
        return sound;
    }
    INLINE bool add(const uint8_t* from, int64_t count, float* sum) {
        float scale;
        const bool sound = read_scale(from, &scale);
        const int8_t* codes = reinterpret_cast<const int8_t*>(from + 4);
        for (int64_t i = 0; i < count; ++i) sum[i] = static_cast<float>(codes[i]) * scale + sum[i];
        return sound;
    }
};

// Byte j of a block of n values holds value j in its lower half and value j + (n + 1) / 2 in its upper half.
struct Int4 {
    static constexpr int64_t kBytes = (4 + kInt4Block / 2) * (kGroup / kInt4Block);
    INLINE int64_t bytes(int64_t count) {
        const int64_t whole = count / kInt4Block, rest = count % kInt4Block;
        return whole * (4 + kInt4Block / 2) + (rest ? 4 + (rest + 1) / 2 : 0);
    }
    INLINE void encode(const float* values, int64_t count, uint32_t, uint8_t* to) {
        for (int64_t begin = 0; begin < count; begin += kInt4Block) {
            const int64_t size = std::min(kInt4Block, count - begin), half = (size + 1) / 2;
            const float* block = values + begin;
            const Scale scale = scale_for(largest_of(block, size), 7.0f);
            std::memcpy(to, &scale.divisor, 4);
            to += 4;
            uint8_t codes[kInt4Block + 1];
            for (int64_t i = 0; i < size; ++i) {
                const float moved = block[i] * scale.factor + kRounder;
                codes[i] = static_cast<uint8_t>(reinterpret_cast<const Bits&>(moved) & 15u);
            }
            codes[size] = 0;
            for (int64_t i = 0; i < half; ++i) to[i] = static_cast<uint8_t>(codes[i] | (codes[half + i] << 4));
            to += half;
        }
    }
    INLINE bool decode(const uint8_t* from, int64_t count, float* out) {
        bool sound = true;
        for (int64_t begin = 0; begin < count; begin += kInt4Block) {
            const int64_t size = std::min(kInt4Block, count - begin), half = (size + 1) / 2;
            float scale;
            sound &= read_scale(from, &scale);
            from += 4;
            for (int64_t i = 0; i < half; ++i) out[i] = static_cast<float>(((from[i] & 15) ^ 8) - 8) * scale;
            for (int64_t i = half; i < size; ++i) {
                out[i] = static_cast<float>(((from[i - half] >> 4) ^ 8) - 8) * scale;
            }
            from += half;
            out += size;
        }
        return sound;
    }
    INLINE bool add(const uint8_t* from, int64_t count, float* sum) {
        float received[kGroup];
        const bool sound = decode(from, count, received);
        for (int64_t i = 0; i < count; ++i) sum[i] = received[i] + sum[i];
        return sound;
    }
};

template <typename Kind>
INLINE bool combine_as(const Hop& hop, int64_t count) {
    const float back = hop.weight == 0.0f ? 0.0f : 1.0f / hop.weight;
    float sum[kGroup], sent[kGroup];
    bool sound = true;
    for (int64_t begin = 0, group = 0; begin < count; begin += kGroup, ++group) {
        const int64_t size = std::min(kGroup, count - begin);
        for (int64_t i = 0; i < size; ++i) sum[i] = hop.own[begin + i] * hop.weight;
        if (hop.received) sound &= Kind::add(hop.received + group * Kind::kBytes, size, sum);
        const uint32_t largest = largest_of(sum, size);
        sound &= largest <= kLargestBits;
        uint8_t* encoded = hop.encoded + group * Kind::kBytes;
        Kind::encode(sum, size, largest, encoded);
        if (!hop.out && !hop.residual) continue;
        Kind::decode(encoded, size, sent);
        if (hop.residual) {
            for (int64_t i = 0; i < size; ++i) hop.residual[begin + i] += (sum[i] - sent[i]) * back;
        }
        if (hop.out) std::memcpy(hop.out + begin, sent, static_cast<size_t>(4 * size));
    }
    return sound;
}

template <typename Kind>
INLINE bool decode_as(const uint8_t* encoded, int64_t count, float* out) {
    bool sound = true;
    for (int64_t begin = 0, group = 0; begin < count; begin += kGroup, ++group) {
        sound &= Kind::decode(encoded + group * Kind::kBytes, std::min(kGroup, count - begin), out + begin);
    }
    return sound;
}

template <typename Kind>
INLINE bool accumulate_as(const uint8_t* encoded, int64_t count, float* sum) {
    bool sound = true;
    for (int64_t begin = 0, group = 0; begin < count; begin += kGroup, ++group) {
        const int64_t size = std::min(kGroup, count - begin);
        sound &= Kind::add(encoded + group * Kind::kBytes, size, sum + begin);
    }
    return sound;
}

}  // namespace

#define FOR_EACH_CODEC(call)           \
    switch (codec) {                   \
        case kFp32: return call(Fp32); \
        case kBf16: return call(Bf16); \
        case kInt8: return call(Int8); \
        default: return call(Int4);    \
    }

#define COMBINE(Kind) combine_as<Kind>(hop, count)
#define DECODE(Kind) decode_as<Kind>(encoded, count, out)
#define ACCUMULATE(Kind) accumulate_as<Kind>(encoded, count, sum)
#define BYTES(Kind) Kind::bytes(count % kGroup)
#define GROUP_BYTES(Kind) Kind::kBytes

namespace portable {

BLOOMERY_CLONES bool combine(int32_t codec, const Hop& hop, int64_t count) { FOR_EACH_CODEC(COMBINE) }

BLOOMERY_CLONES bool decode(int32_t codec, const uint8_t* encoded, int64_t count, float* out) { FOR_EACH_CODEC(DECODE) }

BLOOMERY_CLONES bool accumulate(int32_t codec, const uint8_t* encoded, int64_t count, float* sum) {
    FOR_EACH_CODEC(ACCUMULATE)
}

}  // namespace portable

bool combine(int32_t codec, const Hop& hop, int64_t count) {
#ifdef BLOOMERY_WIDE
    if (codec == kInt8 && has_wide()) return wide::combine(hop, count);
#endif
    return portable::combine(codec, hop, count);
}

bool decode(int32_t codec, const uint8_t* encoded, int64_t count, float* out) {
#ifdef BLOOMERY_WIDE
    if (codec == kInt8 && has_wide()) return wide::decode(encoded, count, out);
#endif
    return portable::decode(codec, encoded, count, out);
}

bool accumulate(int32_t codec, const uint8_t* encoded, int64_t count, float* sum) {
#ifdef BLOOMERY_WIDE
    if (codec == kInt8 && has_wide()) return wide::accumulate(encoded, count, sum);
#endif
    return portable::accumulate(codec, encoded, count, sum);
}

BLOOMERY_CLONES uint32_t largest_magnitude(const float* values, int64_t count) { return largest_of(values, count); }

static int64_t group_bytes(int32_t codec) { FOR_EACH_CODEC(GROUP_BYTES) }
static int64_t rest_bytes(int32_t codec, int64_t count) { FOR_EACH_CODEC(BYTES) }

bool is_codec(int32_t codec) { return codec >= kFp32 && codec <= kInt4; }

bool convert(int32_t received_codec, int32_t codec, const Hop& hop, int64_t count) {
    if (received_codec == codec || !hop.received) return combine(codec, hop, count);
    const float back = hop.weight == 0.0f ? 0.0f : 1.0f / hop.weight;
    float sum[kGroup], lost[kGroup];
    bool sound = true;
    for (int64_t begin = 0; begin < count; begin += kGroup) {
        const int64_t size = std::min(kGroup, count - begin);
        for (int64_t i = 0; i < size; ++i) sum[i] = hop.own[begin + i] * hop.weight;
        sound &= accumulate(received_codec, hop.received + encoded_size(received_codec, begin), size, sum);
        std::fill_n(lost, size, 0.0f);
        // Where both lie in one buffer, this writes only over what was read.
        const Hop whole{sum,  nullptr, hop.encoded + encoded_size(codec, begin), hop.out ? hop.out + begin : nullptr,
                        lost, 1.0f};
        sound &= combine(codec, whole, size);
        for (int64_t i = 0; hop.residual && i < size; ++i) hop.residual[begin + i] += lost[i] * back;
    }
    return sound;
}

int64_t encoded_size(int32_t codec, int64_t count) {
    return count / kGroup * group_bytes(codec) + (count % kGroup ? rest_bytes(codec, count) : 0);
}

void in_pieces(int64_t count, int32_t threads, const std::function<void(int64_t, int64_t)>& work) {
    const int64_t groups = (count + kGroup - 1) / kGroup;
    const int64_t pieces = std::max<int64_t>(1, std::min<int64_t>(threads, groups / 128));  // starting a thread costs 50 us
    std::vector<std::thread> others;
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t begin = groups * piece / pieces * kGroup;
        const int64_t end = std::min(count, groups * (piece + 1) / pieces * kGroup);
        try {
            if (piece + 1 < pieces) {
                others.emplace_back(work, begin, end);
                continue;
            }
        } catch (const std::exception&) {  // no thread or memory is available: this thread does the work
        }
        work(begin, end);
    }
    for (std::thread& other : others) other.join();
}

}  // namespace bloomery

using namespace bloomery;

int64_t bloomery_encoded_size(int32_t codec, int64_t count) {
    return is_codec(codec) && count >= 0 ? encoded_size(codec, count) : -1;
}

int32_t bloomery_encode(int32_t codec, const float* values, int64_t count, int32_t threads, uint8_t* out) {
    if (!is_codec(codec) || count < 0) return -1;
    std::atomic<bool> sound{true};
    in_pieces(count, threads, [&](int64_t begin, int64_t end) {
        const Hop hop{values + begin, nullptr, out + encoded_size(codec, begin), nullptr, nullptr, 1.0f};
        if (!combine(codec, hop, end - begin)) sound = false;
    });
    return sound ? 0 : -2;
}

int32_t bloomery_decode(int32_t codec, const uint8_t* encoded, int64_t count, int32_t threads, float* out) {
    if (!is_codec(codec) || count < 0) return -1;
    std::atomic<bool> sound{true};
    in_pieces(count, threads, [&](int64_t begin, int64_t end) {
        if (!decode(codec, encoded + encoded_size(codec, begin), end - begin, out + begin)) sound = false;
    });
    return sound ? 0 : -2;
}

int32_t bloomery_accumulate(int32_t codec, const uint8_t* encoded, int64_t count, int32_t threads, float* sum) {
    if (!is_codec(codec) || count < 0) return -1;
    std::atomic<bool> sound{true};
    in_pieces(count, threads, [&](int64_t begin, int64_t end) {
        if (!accumulate(codec, encoded + encoded_size(codec, begin), end - begin, sum + begin)) sound = false;
    });
    return sound ? 0 : -2;
}

int32_t bloomery_largest(const float* values, int64_t count, int32_t threads, uint32_t* bits) {
    std::atomic<uint32_t> largest{0};
    in_pieces(count, threads, [&](int64_t begin, int64_t end) {
        const uint32_t found = largest_magnitude(values + begin, end - begin);
        uint32_t known = largest;
        while (known < found && !largest.compare_exchange_weak(known, found)) {}
    });
    *bits = largest;
    return 0;
}
