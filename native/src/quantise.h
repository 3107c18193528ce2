// Codecs, and the steps of a ring over blocks of values. bloomery/transport/gradient_codec.py gives equal results.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

namespace bloomery {

enum Codec : int32_t { kFp32 = 0, kBf16 = 1, kInt8 = 2, kInt4 = 3 };

// Values that are processed at once: a multiple of every codec's block, few enough to stay in the L1 cache.
constexpr int64_t kGroup = 512;

// The bits of 2^120. Larger sums and scales are refused, so that nothing overflows in the ring.
constexpr uint32_t kLargestBits = 0x7B800000u;

// The bits of 2^-100. A block whose values are all smaller is sent as zeros.
constexpr uint32_t kTinyBits = 0x0D800000u;

struct Scale {
    float factor;   // value * factor is a code
    float divisor;  // code * divisor is a value
};

inline Scale scale_for(uint32_t largest_bits, float largest_code) {
    if (largest_bits < kTinyBits) return {0.0f, 0.0f};
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    return {largest_code / largest, largest / largest_code};
}

bool is_codec(int32_t codec);
int64_t encoded_size(int32_t codec, int64_t count);

// One hop: sum = weight * own + received; encoded = the code of sum; out = the values that `encoded` decodes to;
// residual += (sum - out) / weight. received, out and residual may be null. encoded may be the same memory as received,
// and out the same as own.
struct Hop {
    const float* own;
    const uint8_t* received;
    uint8_t* encoded;
    float* out;
    float* residual;
    float weight;
};

// Both return false if a value or scale is not finite or is beyond 2^120; the outputs are then undefined.
bool combine(int32_t codec, const Hop& hop, int64_t count);
// The same where `received` is in another codec than `encoded`, with at least as many bytes for kGroup values.
bool convert(int32_t received_codec, int32_t codec, const Hop& hop, int64_t count);
bool decode(int32_t codec, const uint8_t* encoded, int64_t count, float* out);
bool accumulate(int32_t codec, const uint8_t* encoded, int64_t count, float* sum);

// The portable versions. `combine` and the others use a faster version where the processor has one.
namespace portable {
bool combine(int32_t codec, const Hop& hop, int64_t count);
bool decode(int32_t codec, const uint8_t* encoded, int64_t count, float* out);
bool accumulate(int32_t codec, const uint8_t* encoded, int64_t count, float* sum);
}  // namespace portable

// Returns the bits of the largest magnitude; from 0x7F800000 on, some value is not finite.
uint32_t largest_magnitude(const float* values, int64_t count);

// Calls work(begin, end) for pieces of [0, count) that are multiples of kGroup, on at most `threads` threads.
void in_pieces(int64_t count, int32_t threads, const std::function<void(int64_t, int64_t)>& work);

}  // namespace bloomery
