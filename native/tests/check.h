// Helpers of the native tests: a check that ends the program, numbers from a seed, rings over pairs of sockets.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

#include "bloomery.h"

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            std::abort();                                                             \
        }                                                                             \
    } while (false)

using Random = std::mt19937_64;

inline int64_t below(Random& random, int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); }

// Allocates exactly this size on the heap, so that a sanitizer sees an access behind the end.
inline std::vector<float> normal_values(Random& random, int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(random);
    return values;
}

struct Pair {
    int left, right;
    Pair() {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        left = ends[0];
        right = ends[1];
    }
    Pair(const Pair&) = delete;
    ~Pair() {
        close(left);
        close(right);
    }
};

// The members of a ring over pairs of sockets: hop i * streams + s connects member i to member i + 1.
struct Members {
    int32_t size, streams;
    std::vector<std::unique_ptr<Pair>> hops;
    std::vector<void*> rings;

    Members(int32_t members, int32_t hop_streams, int32_t codec, int32_t threads, int64_t chunk,
            int32_t gather = 0)
        : size(members), streams(hop_streams) {
        for (int32_t i = 0; i < size * streams; ++i) hops.push_back(std::make_unique<Pair>());
        const std::vector<uint8_t> keys(static_cast<size_t>(32 * streams), 7);
        for (int32_t member = 0; member < size; ++member) {
            std::vector<int32_t> next, previous;
            for (int32_t stream = 0; stream < streams; ++stream) {
                next.push_back(hop(member, stream).left);
                previous.push_back(hop((member + size - 1) % size, stream).right);
            }
            bloomery_ring_options options{};
            options.size = sizeof(options);
            options.index = member;
            options.members = size;
            options.streams = streams;
            options.codec = codec;
            options.gather = gather;
            options.threads = threads;
            options.chunk = chunk;
            options.next = next.data();
            options.previous = previous.data();
            options.send_keys = options.receive_keys = keys.data();
            rings.push_back(bloomery_ring_create(&options));
            CHECK(rings.back());
        }
    }
    ~Members() {
        for (void* ring : rings) CHECK(bloomery_ring_destroy(ring) == 0);
    }
    Pair& hop(int32_t member, int32_t stream) { return *hops[static_cast<size_t>(member * streams + stream)]; }
};

inline bloomery_ring_call call_of(const float* values, float* out, int64_t count) {
    bloomery_ring_call call{};
    call.size = sizeof(call);
    call.weight = 1.0f;
    call.values = values;
    call.out = out;
    call.count = count;
    call.stall_s = 120;
    call.deadline_s = 240;
    return call;
}

inline bloomery_ring_report empty_report() {
    bloomery_ring_report report{};
    report.size = sizeof(report);
    return report;
}
