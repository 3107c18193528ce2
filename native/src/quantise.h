// How values travel: codecs, and the steps of a ring over blocks of values (bloomery/elastic/wire/codec.py is equal).
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

namespace bloomery {

enum Codec : int32_t { kFp32 = 0, kBf16 = 1, kInt8 = 2, kInt4 = 3 };

// Values that are worked on at once: a multiple of every codec's block, small enough to stay in the first cache.
constexpr int64_t kGroup = 512;

// Bits of 2^120: sums and scales beyond it are refused, so nothing overflows on the way.
constexpr uint32_t kLargestBits = 0x7B800000u;

// Bits of 2^-100: a block that is smaller throughout travels as zeros.
constexpr uint32_t kTinyBits = 0x0D800000u;

struct Scale {
    float factor;   // value * factor: a code
    float divisor;  // code * divisor: a value
};

inline Scale scale_for(uint32_t largest_bits, float largest_code) {
    if (largest_bits < kTinyBits) return {0.0f, 0.0f};
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    return {largest_code / largest, largest / largest_code};
}

bool is_codec(int32_t codec);
int64_t encoded_size(int32_t codec, int64_t count);

// One hop: sum = weight * own + received; encoded = sum in the codec; out = what that decodes to;
// residual += (sum - out) / weight. received, out and residual may be null; encoded may be received, out may be own.
struct Hop {
    const float* own;
    const uint8_t* received;
    uint8_t* encoded;
    float* out;
    float* residual;
    float weight;
};

// Both return false, with outputs undefined, where a value or scale is not finite or beyond 2^120.
bool combine(int32_t codec, const Hop& hop, int64_t count);
bool decode(int32_t codec, const uint8_t* encoded, int64_t count, float* out);
bool accumulate(int32_t codec, const uint8_t* encoded, int64_t count, float* sum);

// The same for every processor; combine and the others take what is faster where there is something.
namespace portable {
bool combine(int32_t codec, const Hop& hop, int64_t count);
bool decode(int32_t codec, const uint8_t* encoded, int64_t count, float* out);
bool accumulate(int32_t codec, const uint8_t* encoded, int64_t count, float* sum);
}  // namespace portable

// The bits of the largest magnitude: from 0x7F800000 on, some value is not finite.
uint32_t largest_magnitude(const float* values, int64_t count);

// Calls work(begin, end) over range(count) in pieces that are multiples of kGroup, on so many threads.
void in_pieces(int64_t count, int32_t threads, const std::function<void(int64_t, int64_t)>& work);

}  // namespace bloomery
