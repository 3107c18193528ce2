// A keyed checksum for every frame: SipHash-2-4 with 128 bits, over the header and over eight lanes of the payload.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bloomery {

constexpr size_t kKeyBytes = 32;
constexpr size_t kMacBytes = 16;

// The keys that are derived from a connection's key and an epoch: one for the lanes, one for the hash of their results.
struct MacKey {
    uint64_t lanes[2];
    uint64_t whole[2];
};

MacKey derive_key(const uint8_t* key, uint64_t epoch);

// Word w of the payload (8 bytes; the last word is padded with zeros) goes to lane w % 8. Each lane is SipHash-2-4 over
// its words. The result is SipHash-2-4-128 over the header and the lanes' hashes. The header must contain the payload's
// length.
void frame_mac(const MacKey& key, const uint8_t* header, size_t header_bytes, const uint8_t* payload, size_t bytes,
               uint8_t* mac);

void siphash128(const uint64_t key[2], const uint8_t* data, size_t bytes, uint8_t* out);

// Compares in constant time.
bool equal_macs(const uint8_t* left, const uint8_t* right);

}  // namespace bloomery
