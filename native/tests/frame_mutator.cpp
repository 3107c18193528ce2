// Sends invalid frames to a member for some seconds, generated from a seed. Whatever arrives, each call must end with a
// correct sum or with a refusal.
//
//     frame_mutator SECONDS [SEED]       prints how many streams of frames ended in which way; on a failure, the seed
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>

#include "../src/frame.h"
#include "../src/quantise.h"
#include "check.h"

using namespace bloomery;

namespace {

constexpr uint8_t kKey[32] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};

uint64_t current_seed = 0;

// The options below make sanitizers end the program by abort().
void name_seed(int) {
    char text[64];
    const int size = std::snprintf(text, sizeof(text), "seed %llu\n", static_cast<unsigned long long>(current_seed));
    if (write(STDERR_FILENO, text, static_cast<size_t>(size)) < 0) _exit(2);
    std::signal(SIGABRT, SIG_DFL);
    std::abort();
}

// The frames that the other one of two members would send, and where each begins.
struct Stream {
    std::vector<uint8_t> bytes;
    std::vector<size_t> frames;
};

Stream sound_stream(Random& random, const Layout& mine, float value) {
    Layout theirs = mine;
    theirs.index = 1;
    const MacKey key = derive_key(kKey, 0);
    Stream stream;
    uint64_t sequence = 0;
    const auto add = [&](FrameType type, int32_t step, int64_t chunk, int64_t values) {
        const Expected expected{&theirs, 0, 0, sequence++, theirs.fingerprint(), 0};
        const int64_t length = encoded_size(mine.codec, values);
        const Header header = make_header(expected, type, step, chunk, length);
        std::vector<uint8_t> frame(kHeaderBytes + static_cast<size_t>(length));
        std::memcpy(frame.data(), &header, kHeaderBytes);
        const std::vector<float> sent(static_cast<size_t>(values), value);
        CHECK(combine(mine.codec, {sent.data(), nullptr, frame.data() + kHeaderBytes, nullptr, nullptr, 1.0f}, values));
        seal(key, frame.data());
        stream.frames.push_back(stream.bytes.size());
        stream.bytes.insert(stream.bytes.end(), frame.begin(), frame.end());
    };
    for (int32_t step = 0; step < theirs.steps(); ++step) {
        const int32_t segment = theirs.sent_segment(step);
        for (int64_t chunk = 0; chunk < theirs.chunks_of(segment); ++chunk) {
            if (below(random, 8) == 0) add(kWaiting, 0, 0, 0);
            add(kData, step, chunk, theirs.chunk_length(segment, chunk));
        }
    }
    add(kEnd, 0, 0, 0);
    return stream;
}

// Overwrites a field of a header, or any other bytes, with an unusual value.
void overwrite(Random& random, std::vector<uint8_t>& bytes, size_t frame) {
    static const uint64_t odd[] = {0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, ~uint64_t{0}};
    const uint64_t value = below(random, 3) ? odd[below(random, 12)] : random();
    const size_t at = frame + static_cast<size_t>(below(random, 2) ? 4 * below(random, 16) : below(random, 80));
    const size_t size = size_t{1} << below(random, 4);
    if (at + size <= bytes.size()) std::memcpy(bytes.data() + at, &value, size);
}

// Returns true if the changed frame may be valid, because its checksum was computed again.
bool mutate(Random& random, Stream& stream) {
    std::vector<uint8_t>& bytes = stream.bytes;
    const size_t frame = stream.frames[static_cast<size_t>(below(random, static_cast<int64_t>(stream.frames.size())))];
    const auto any = [&] { return static_cast<size_t>(below(random, static_cast<int64_t>(bytes.size()))); };
    const auto place = [&](size_t at) { return bytes.begin() + static_cast<ptrdiff_t>(at); };
    if (bytes.size() < kHeaderBytes) return false;
    switch (below(random, 7)) {
        case 0: bytes[any()] ^= static_cast<uint8_t>(1 << below(random, 8)); return false;
        case 1: bytes.resize(any()); return false;
        case 2: bytes.erase(place(any()), bytes.end() - below(random, 2)); return false;
        case 3: {
            const std::vector<uint8_t> copy(place(any()), bytes.end());
            bytes.insert(place(any()), copy.begin(), copy.begin() + below(random, static_cast<int64_t>(copy.size()) + 1));
            return false;
        }
        case 4: overwrite(random, bytes, frame); return false;
        default: {  // a member that computes wrongly, or an attacker who has the key
            if (frame + kHeaderBytes > bytes.size()) return false;
            overwrite(random, bytes, frame);
            Header header;
            std::memcpy(&header, bytes.data() + frame, kHeaderBytes);
            if (header.length > bytes.size() - frame - kHeaderBytes) return false;
            seal(derive_key(kKey, 0), bytes.data() + frame);
            return true;
        }
    }
}

int32_t feed_one(Random& random) {
    const int32_t codec = static_cast<int32_t>(below(random, 4));
    const Layout layout{below(random, 3000), 512 * (1 + below(random, 3)), 2, 0, codec, codec};
    Members members(2, 1, codec, 0, layout.chunk);
    Stream stream = sound_stream(random, layout, 2.0f);
    bool sealed = false;
    for (int64_t i = below(random, 4); i > 0; --i) sealed |= mutate(random, stream);
    Pair& incoming = members.hop(1, 0);
    const ssize_t size = static_cast<ssize_t>(stream.bytes.size());
    CHECK(send(incoming.left, stream.bytes.data(), stream.bytes.size(), MSG_NOSIGNAL) == size);
    shutdown(incoming.left, SHUT_WR);
    const std::vector<float> values(static_cast<size_t>(layout.count), 1.0f);
    std::vector<float> out(values.size());
    const bloomery_ring_call call = call_of(values.data(), out.data(), layout.count);
    bloomery_ring_report report = empty_report();
    const int32_t kind = bloomery_ring_all_reduce(members.rings[0], &call, &report);
    CHECK(kind == 0 || kind == BLOOMERY_RING_CLOSED || kind == BLOOMERY_RING_AUTHENTICATION || kind == BLOOMERY_RING_GARBAGE);
    CHECK(kind == 0 || std::strlen(report.text) > 0);
    for (size_t i = 0; kind == 0 && i < out.size(); ++i) {
        CHECK(std::isfinite(out[i]));
        // The second segment is a sum made here; the first was received in the all_gather.
        if (!sealed) CHECK(out[i] == (i < static_cast<size_t>(layout.begin_of(1)) ? 2.0f : 3.0f));
    }
    return kind;
}

}  // namespace

extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

int main(int count, char** arguments) {
    std::signal(SIGABRT, name_seed);
    const double seconds = count > 1 ? std::strtod(arguments[1], nullptr) : 1;
    const uint64_t first = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    const auto began = std::chrono::steady_clock::now();
    int64_t ended[BLOOMERY_RING_POISONED + 1] = {};
    uint64_t seed = first;
    do {
        for (int i = 0; i < 50; ++i, ++seed) {
            Random random(seed);
            current_seed = seed;
            ++ended[feed_one(random)];
        }
    } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() < seconds);
    std::printf("%llu streams from seed %llu: %lld sound, %lld cut off, %lld not genuine, %lld garbage\n",
                static_cast<unsigned long long>(seed - first), static_cast<unsigned long long>(first),
                static_cast<long long>(ended[0]), static_cast<long long>(ended[BLOOMERY_RING_CLOSED]),
                static_cast<long long>(ended[BLOOMERY_RING_AUTHENTICATION]),
                static_cast<long long>(ended[BLOOMERY_RING_GARBAGE]));
}
