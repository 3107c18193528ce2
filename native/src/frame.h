// Frames: a fixed header and a chunk of values; and what a receiver checks in a header before it reads the payload.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mac.h"

namespace bloomery {

constexpr uint32_t kMagic = 0x314D4C42u;  // "BLM1"
constexpr uint8_t kFrameVersion = 1;

enum FrameType : uint8_t {
    kData = 0,     // a chunk of values
    kEnd = 1,      // no more frames come on this connection in this round; no payload
    kWaiting = 2,  // the sender is alive and waits for another member; no payload
};

struct Header {
    uint32_t magic;
    uint8_t version, type;
    uint16_t lane;
    uint32_t step, chunk;
    uint64_t epoch, round, sequence;
    uint32_t length, geometry;
    uint8_t mac[kMacBytes];
};

constexpr size_t kHeaderBytes = 64;
constexpr size_t kSealedBytes = kHeaderBytes - kMacBytes;
static_assert(sizeof(Header) == kHeaderBytes, "a header travels as it lies in memory");

// How an array is divided: into one segment for each member, and each segment into chunks. Step t of 2 (members - 1)
// sends segment index - t and receives segment index - t - 1. The first members - 1 steps are the reduce_scatter, the
// others the all_gather. An array that is only gathered has no steps of the first kind, and its fp32 values are not
// looked at.
struct Layout {
    int64_t count;
    int64_t chunk;
    int32_t members, index, codec;
    int32_t gather_codec;  // of sums that are handed round; `codec` is of what is still being added up
    bool gathers = false;  // whether the array is only gathered

    int32_t steps() const { return reducing_steps() + members - 1; }
    int32_t reducing_steps() const { return gathers ? 0 : members - 1; }
    int32_t codec_of(int32_t step) const { return step < reducing_steps() ? codec : gather_codec; }
    int32_t sent_segment(int32_t step) const { return wrapped(index - step); }
    int32_t received_segment(int32_t step) const { return wrapped(index - step - 1); }
    int64_t begin_of(int32_t segment) const { return count / members * segment + count % members * segment / members; }
    int64_t length_of(int32_t segment) const { return begin_of(segment + 1) - begin_of(segment); }
    int64_t chunks_of(int32_t segment) const { return (length_of(segment) + chunk - 1) / chunk; }
    int64_t most_chunks() const { return (count / members + (count % members != 0) + chunk - 1) / chunk; }
    // For a chunk of a segment: where it begins in the array, and how many values it has.
    int64_t chunk_begin(int32_t segment, int64_t number) const { return begin_of(segment) + number * chunk; }
    int64_t chunk_length(int32_t segment, int64_t number) const;
    // A hash that differs if the two ends disagree about the array, the members or the codec.
    uint32_t fingerprint() const;

   private:
    int32_t wrapped(int32_t segment) const { return (segment % members + members) % members; }
};

// The chunk size that is used if the caller gives none: about 64 KiB of payload, less for short arrays.
int64_t usual_chunk(int64_t count, int32_t members, int32_t codec);

struct Expected {
    const Layout* layout;
    uint64_t epoch, round, sequence;
    uint32_t geometry;
    uint16_t lane;
};

enum Verdict : int32_t { kSound = 0, kGarbage = 1, kOtherRound = 2, kOtherArray = 3, kReplayed = 4 };

// What is wrong with a header. kSound: its chunk exists, and its length is that chunk's.
Verdict examine(const Header& header, const Expected& expected);
const char* describe(Verdict verdict);

Header make_header(const Expected& expected, FrameType type, int32_t step, int64_t chunk, int64_t length);
// frame: a header, and its payload directly after it.
void seal(const MacKey& key, uint8_t* frame);
bool is_genuine(const MacKey& key, const uint8_t* frame);

}  // namespace bloomery
