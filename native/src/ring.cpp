// The C ABI of the ring. It checks arguments, lets no exception out, and allows one call at a time.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>

#include "quantise.h"
#include "ring_exchange.h"

namespace bloomery {
namespace {

constexpr int64_t kMostValues = int64_t{1} << 42;
constexpr int64_t kMostChunk = int64_t{1} << 26;
constexpr double kMostGrace = 1e6;  // seconds
constexpr int32_t kMostMembers = 1 << 12, kMostStreams = 256;
// The limit of an own value times the weight: with the most members no sum reaches the codecs' limit.
constexpr float kMostOwn = 0x1p100f;

struct Ring {
    Lane lane;
    std::mutex mutex;
    std::condition_variable idle;
    bool running = false, poisoned = false;
    pid_t process = getpid();

    ~Ring() {
        if (lane.event >= 0) close(lane.event);
    }
};

bool have_codec(const bloomery_ring_options& options) {
    if (only_gathers(options)) return !options.gather;
    return is_codec(options.codec) && is_codec(gather_codec(options)) &&
           encoded_size(gather_codec(options), kGroup) <= encoded_size(options.codec, kGroup);
}

bool are_sound(const bloomery_ring_options* options) {
    return options && options->size == sizeof(*options) && options->members >= 2 && options->members <= kMostMembers &&
           options->index >= 0 && options->index < options->members && options->streams >= 1 &&
           options->streams <= kMostStreams && have_codec(*options) && options->lane >= 0 &&
           options->lane <= 0xFFFF && options->threads >= 0 && options->threads <= 64 && options->chunk >= 0 &&
           options->chunk <= kMostChunk && options->chunk % kGroup == 0 && options->next && options->previous &&
           options->send_keys && options->receive_keys;
}

bool is_sound(const bloomery_ring_call* call) {
    return call && call->size == sizeof(*call) && call->count >= 0 && call->count <= kMostValues &&
           ((call->values && call->out) || !call->count) && std::isfinite(call->weight) && call->weight >= 0 &&
           call->stall_s > 0 && call->deadline_s > 0 && call->rate_limit_bytes_s >= 0;
}

// Segments that are gathered are of one length, and the own one is sent from where the others are written.
bool can_gather(const bloomery_ring_options& options, const bloomery_ring_call& call) {
    return call.count % options.members == 0 && call.values == call.out;
}

// Sockets other than TCP refuse these options, which does no harm.
void prepare(const Lane& lane) {
    const int on = 1, unsent = 16 << 10;
    for (const int descriptor : lane.next) {
        setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
        // A socket with a long queue keeps chunks that faster sockets could send.
        setsockopt(descriptor, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof(unsent));
    }
}

void limit_silence(const Lane& lane, double stall_s) {
    const unsigned milliseconds = static_cast<unsigned>(std::min(stall_s * 1000.0, 1e9));
    for (const int descriptor : lane.next) {
        setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
    }
}

int32_t answer(bloomery_ring_report* report, int32_t kind, const char* text) {
    report->kind = kind;
    std::snprintf(report->text, sizeof(report->text), "%s", text);
    return kind;
}

int32_t reduce(Ring& ring, const bloomery_ring_call& call, bloomery_ring_report& report) {
    const bool gathers = only_gathers(ring.lane.options);
    if (gathers && !can_gather(ring.lane.options, call)) {
        return answer(&report, BLOOMERY_RING_BAD_ARGUMENT, "segments of unequal length, or not in place");
    }
    uint32_t bits = 0;
    if (!gathers) bloomery_largest(call.values, call.count, ring.lane.options.threads, &bits);
    float largest;
    std::memcpy(&largest, &bits, 4);
    if (!(largest * call.weight <= kMostOwn) || bits >= 0x7F800000u) {
        return answer(&report, BLOOMERY_RING_NOT_FINITE, "own values are not finite, or beyond 2^100; nothing was sent");
    }
    limit_silence(ring.lane, call.stall_s + ring.lane.grace_s);
    int32_t kind;
    try {
        kind = Exchange(ring.lane, call, report).run();
    } catch (const std::exception& error) {  // no memory or no thread was available
        kind = answer(&report, BLOOMERY_RING_BAD_ARGUMENT, error.what());
    }
    const std::lock_guard<std::mutex> lock(ring.mutex);
    ring.poisoned = kind != 0;
    return kind;
}

}  // namespace
}  // namespace bloomery

using namespace bloomery;

void* bloomery_ring_create(const bloomery_ring_options* options) {
    if (!are_sound(options)) return nullptr;
    try {
        auto ring = std::make_unique<Ring>();
        const size_t streams = static_cast<size_t>(options->streams);
        Lane& lane = ring->lane;
        lane.options = *options;
        lane.next.assign(options->next, options->next + streams);
        lane.previous.assign(options->previous, options->previous + streams);
        lane.send_keys.assign(options->send_keys, options->send_keys + streams * kKeyBytes);
        lane.receive_keys.assign(options->receive_keys, options->receive_keys + streams * kKeyBytes);
        lane.sent.resize(streams);
        lane.received.resize(streams);
        lane.allowed_at = Clock::now();
        lane.event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (lane.event < 0) return nullptr;
        prepare(lane);
        return ring.release();
    } catch (const std::exception&) {
        return nullptr;
    }
}

int32_t bloomery_ring_all_reduce(void* handle, const bloomery_ring_call* call, bloomery_ring_report* report) {
    if (!report || report->size != sizeof(*report)) return BLOOMERY_RING_BAD_ARGUMENT;
    *report = {};
    report->size = sizeof(*report);
    if (!handle || !is_sound(call)) return answer(report, BLOOMERY_RING_BAD_ARGUMENT, "an argument out of bounds");
    Ring& ring = *static_cast<Ring*>(handle);
    if (ring.process != getpid()) return answer(report, BLOOMERY_RING_FORKED, "this ring was made before a fork");
    {
        const std::lock_guard<std::mutex> lock(ring.mutex);
        if (ring.running) return answer(report, BLOOMERY_RING_BUSY, "another thread is in a call");
        if (ring.lane.cancelled) return answer(report, BLOOMERY_RING_CANCELLED, "cancelled");
        if (ring.poisoned) return answer(report, BLOOMERY_RING_POISONED, "it failed before");
        ring.running = true;
    }
    const int32_t kind = reduce(ring, *call, *report);
    {
        const std::lock_guard<std::mutex> lock(ring.mutex);
        ring.running = false;
        ring.idle.notify_all();
    }
    return kind;
}

int32_t bloomery_ring_grace(void* handle, double seconds) {
    Ring& ring = *static_cast<Ring*>(handle);
    const std::lock_guard<std::mutex> lock(ring.mutex);
    if (ring.running || !(seconds >= 0 && seconds <= kMostGrace)) return BLOOMERY_RING_BAD_ARGUMENT;
    ring.lane.grace_s = seconds;
    return 0;
}

int32_t bloomery_ring_cancel(void* handle) {
    Ring& ring = *static_cast<Ring*>(handle);
    if (ring.process != getpid()) return BLOOMERY_RING_FORKED;
    std::unique_lock<std::mutex> lock(ring.mutex);
    ring.lane.cancelled = true;
    const uint64_t one = 1;
    if (write(ring.lane.event, &one, sizeof(one)) < 0) return BLOOMERY_RING_BAD_ARGUMENT;
    ring.idle.wait(lock, [&ring] { return !ring.running; });
    return 0;
}

int32_t bloomery_ring_destroy(void* handle) {
    const int32_t refused = bloomery_ring_cancel(handle);
    if (refused) return refused;
    delete static_cast<Ring*>(handle);
    return 0;
}
