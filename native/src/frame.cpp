#include "frame.h"

#include <algorithm>
#include <cstring>

#include "bloomery.h"
#include "quantise.h"

namespace bloomery {

int64_t Layout::chunk_length(int32_t segment, int64_t number) const {
    return std::min(chunk, length_of(segment) - number * chunk);
}

uint32_t Layout::fingerprint() const {
    const uint64_t words[4] = {static_cast<uint64_t>(count), static_cast<uint64_t>(chunk),
                               static_cast<uint64_t>(members),
                               static_cast<uint64_t>(codec == gather_codec ? codec : codec | (1 + gather_codec) << 8) |
                                   static_cast<uint64_t>(gathers) << 32};
    const uint64_t key[2] = {0, 0};  // not secret: the hash only shows whether both ends were asked to do the same
    uint32_t hash[4];
    siphash128(key, reinterpret_cast<const uint8_t*>(words), sizeof(words), reinterpret_cast<uint8_t*>(hash));
    return hash[0];
}

int64_t usual_chunk(int64_t count, int32_t members, int32_t codec) {
    const int64_t most = (int64_t{64} << 10) * kGroup / encoded_size(codec, kGroup) / kGroup * kGroup;
    const int64_t fitting = (count / members / 32 + kGroup - 1) / kGroup * kGroup;
    return std::clamp(fitting, int64_t{16} * kGroup, most);
}

Verdict examine(const Header& header, const Expected& expected) {
    if (header.magic != kMagic || header.version != kFrameVersion || header.type > kWaiting) return kGarbage;
    if (header.lane != expected.lane) return kGarbage;
    if (header.epoch != expected.epoch || header.round != expected.round) return kOtherRound;
    if (header.sequence != expected.sequence) return kReplayed;
    if (header.geometry != expected.geometry) return kOtherArray;
    if (header.type != kData) return header.length == 0 ? kSound : kGarbage;
    const Layout& layout = *expected.layout;
    if (header.step >= static_cast<uint32_t>(layout.steps())) return kGarbage;
    const int32_t segment = layout.received_segment(static_cast<int32_t>(header.step));
    if (header.chunk >= layout.chunks_of(segment)) return kGarbage;
    const int64_t length = encoded_size(layout.codec_of(static_cast<int32_t>(header.step)), layout.chunk_length(segment, header.chunk));
    return header.length == length ? kSound : kGarbage;
}

const char* describe(Verdict verdict) {
    switch (verdict) {
        case kSound: return "a sound frame";
        case kOtherRound: return "a frame of another round or epoch";
        case kOtherArray: return "a frame of another array: sizes, members or codecs differ between the two ends";
        case kReplayed: return "a frame out of its turn: repeated, lost or reordered";
        default: return "no frame: a wrong mark, type, lane, chunk or length";
    }
}

Header make_header(const Expected& expected, FrameType type, int32_t step, int64_t chunk, int64_t length) {
    Header header{};
    header.magic = kMagic;
    header.version = kFrameVersion;
    header.type = type;
    header.lane = expected.lane;
    header.step = static_cast<uint32_t>(step);
    header.chunk = static_cast<uint32_t>(chunk);
    header.epoch = expected.epoch;
    header.round = expected.round;
    header.sequence = expected.sequence;
    header.length = static_cast<uint32_t>(length);
    header.geometry = expected.geometry;
    return header;
}

void seal(const MacKey& key, uint8_t* frame) {
    Header header;
    std::memcpy(&header, frame, kHeaderBytes);
    frame_mac(key, frame, kSealedBytes, frame + kHeaderBytes, header.length, frame + kSealedBytes);
}

bool is_genuine(const MacKey& key, const uint8_t* frame) {
    Header header;
    std::memcpy(&header, frame, kHeaderBytes);
    uint8_t mac[kMacBytes];
    frame_mac(key, frame, kSealedBytes, frame + kHeaderBytes, header.length, mac);
    return equal_macs(mac, frame + kSealedBytes);
}

}  // namespace bloomery

int32_t bloomery_seal_frame(const uint8_t* key, uint64_t epoch, uint8_t* frame) {
    bloomery::seal(bloomery::derive_key(key, epoch), frame);
    return 0;
}
