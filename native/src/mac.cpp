// SipHash-2-4 (Aumasson and Bernstein, 2012): one lane in scalar code, eight lanes in vectors.
#include "mac.h"

#include <cstring>

#include "bloomery.h"
#include "wide.h"

#define INLINE static inline __attribute__((always_inline))

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words travel as they lie in memory");

namespace bloomery {
namespace {

constexpr uint64_t kStart[4] = {0x736f6d6570736575u, 0x646f72616e646f6du, 0x6c7967656e657261u, 0x7465646279746573u};
constexpr size_t kLanes = 8;
typedef uint64_t Half __attribute__((vector_size(4 * kLanes)));   // a register of AVX2
typedef uint64_t Whole __attribute__((vector_size(8 * kLanes)));  // a register of AVX-512, which also rotates words in one instruction

template <typename Word>
INLINE void rotate(Word& word, int bits) {
    word = (word << bits) | (word >> (64 - bits));
}

template <typename Word>
INLINE void sip_round(Word& a, Word& b, Word& c, Word& d) {
    a += b;
    c += d;
    rotate(b, 13);
    rotate(d, 16);
    b ^= a;
    d ^= c;
    rotate(a, 32);
    c += b;
    a += d;
    rotate(b, 17);
    rotate(d, 21);
    b ^= c;
    d ^= a;
    rotate(c, 32);
}

template <typename Word>
INLINE void absorb(Word& a, Word& b, Word& c, Word& d, const Word& word) {
    d ^= word;
    sip_round(a, b, c, d);
    sip_round(a, b, c, d);
    a ^= word;
}

template <typename Vector>
struct State {
    Vector a, b, c, d;
};

// As many independent states as hold all lanes, so that their instructions overlap.
template <typename Vector>
struct States {
    static constexpr size_t kCount = 8 * kLanes / sizeof(Vector);
    State<Vector> all[kCount];
};

template <typename Vector>
INLINE void absorb_all(States<Vector>& states, const uint8_t* from) {
    Vector words[States<Vector>::kCount];
    for (size_t i = 0; i < states.kCount; ++i) {
        std::memcpy(&words[i], from + i * sizeof(Vector), sizeof(Vector));
        states.all[i].d ^= words[i];
    }
    for (int round = 0; round < 2; ++round) {
        for (State<Vector>& state : states.all) sip_round(state.a, state.b, state.c, state.d);
    }
    for (size_t i = 0; i < states.kCount; ++i) states.all[i].a ^= words[i];
}

template <typename Vector>
INLINE void hash_lanes_in(const uint64_t* key, const uint8_t* payload, size_t bytes, uint64_t* out) {
    constexpr size_t kWords = 8 * kLanes;
    const Vector zero = {};
    States<Vector> states;
    for (State<Vector>& state : states.all) {
        state = {zero + (kStart[0] ^ key[0]), zero + (kStart[1] ^ key[1]), zero + (kStart[2] ^ key[0]),
                 zero + (kStart[3] ^ key[1])};
    }
    for (; bytes >= kWords; bytes -= kWords, payload += kWords) absorb_all(states, payload);
    if (bytes) {
        uint8_t rest[kWords] = {};
        std::memcpy(rest, payload, bytes);
        absorb_all(states, rest);
    }
    for (State<Vector>& state : states.all) {
        state.c ^= zero + 0xFF;
        for (int round = 0; round < 4; ++round) sip_round(state.a, state.b, state.c, state.d);
        state.a ^= state.b ^ state.c ^ state.d;
        std::memcpy(out, &state.a, sizeof(state.a));
        out += sizeof(Vector) / 8;
    }
}

BLOOMERY_CLONES void hash_lanes_portable(const uint64_t* key, const uint8_t* payload, size_t bytes, uint64_t* out) {
    hash_lanes_in<Half>(key, payload, bytes, out);
}

#ifdef BLOOMERY_WIDE
BLOOMERY_WIDE void hash_lanes_wide(const uint64_t* key, const uint8_t* payload, size_t bytes, uint64_t* out) {
    hash_lanes_in<Whole>(key, payload, bytes, out);
}
#endif

void hash_lanes(const uint64_t* key, const uint8_t* payload, size_t bytes, uint64_t* out) {
#ifdef BLOOMERY_WIDE
    if (has_wide()) return hash_lanes_wide(key, payload, bytes, out);
#endif
    hash_lanes_portable(key, payload, bytes, out);
}

}  // namespace

void siphash128(const uint64_t key[2], const uint8_t* data, size_t bytes, uint8_t* out) {
    uint64_t a = kStart[0] ^ key[0], b = kStart[1] ^ key[1] ^ 0xEE, c = kStart[2] ^ key[0], d = kStart[3] ^ key[1];
    uint64_t word;
    size_t at = 0;
    for (; at + 8 <= bytes; at += 8) {
        std::memcpy(&word, data + at, 8);
        absorb(a, b, c, d, word);
    }
    word = static_cast<uint64_t>(bytes) << 56;
    for (size_t i = at; i < bytes; ++i) word |= static_cast<uint64_t>(data[i]) << (8 * (i - at));
    absorb(a, b, c, d, word);
    c ^= 0xEE;
    for (int i = 0; i < 4; ++i) sip_round(a, b, c, d);
    word = a ^ b ^ c ^ d;
    std::memcpy(out, &word, 8);
    b ^= 0xDD;
    for (int i = 0; i < 4; ++i) sip_round(a, b, c, d);
    word = a ^ b ^ c ^ d;
    std::memcpy(out + 8, &word, 8);
}

MacKey derive_key(const uint8_t* key, uint64_t epoch) {
    uint64_t words[4];
    std::memcpy(words, key, kKeyBytes);
    uint8_t purpose[16] = {'l', 'a', 'n', 'e', 's'};
    std::memcpy(purpose + 8, &epoch, 8);
    MacKey derived;
    siphash128(words, purpose, sizeof(purpose), reinterpret_cast<uint8_t*>(derived.lanes));
    std::memcpy(purpose, "whole", 5);
    siphash128(words + 2, purpose, sizeof(purpose), reinterpret_cast<uint8_t*>(derived.whole));
    return derived;
}

void frame_mac(const MacKey& key, const uint8_t* header, size_t header_bytes, const uint8_t* payload, size_t bytes,
               uint8_t* mac) {
    uint8_t whole[128 + 8 * kLanes];
    std::memcpy(whole, header, header_bytes);
    uint64_t lanes[kLanes];
    hash_lanes(key.lanes, payload, bytes, lanes);
    std::memcpy(whole + header_bytes, lanes, sizeof(lanes));
    siphash128(key.whole, whole, header_bytes + sizeof(lanes), mac);
}

bool equal_macs(const uint8_t* left, const uint8_t* right) {
    uint8_t different = 0;
    for (size_t i = 0; i < kMacBytes; ++i) different = static_cast<uint8_t>(different | (left[i] ^ right[i]));
    return different == 0;
}

}  // namespace bloomery

int32_t bloomery_siphash128(const uint8_t* key, const uint8_t* data, int64_t bytes, uint8_t* out) {
    uint64_t words[2];
    std::memcpy(words, key, sizeof(words));
    bloomery::siphash128(words, data, static_cast<size_t>(bytes), out);
    return 0;
}
