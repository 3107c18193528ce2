#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>

#include "quantise.h"
#include "ring_exchange.h"

namespace bloomery {

Workers::Workers(const Lane& lane, const Layout& layout, const bloomery_ring_call& call, int32_t threads)
    : lane_(lane), layout_(layout), call_(call) {
    for (size_t at = 0; at < lane.receive_keys.size(); at += kKeyBytes) {
        keys_.push_back(derive_key(lane.receive_keys.data() + at, call.epoch));
    }
    try {
        for (int32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::exception&) {
        // No thread or no memory is available: the threads that run do the work, and without any the caller does it.
        // An exception must not leave this function, because it would destroy threads that are not joined.
    }
}

Workers::~Workers() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Workers::take(const Piece& piece) {
    if (threads_.empty()) return finish(piece);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        waiting_.push_back(piece);
    }
    wake_.notify_one();
}

bool Workers::collect(std::vector<Piece>& done, Failure& failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
    if (!refused_) return true;
    failure.kind = refused_;
    failure.culprit = BLOOMERY_RING_PREVIOUS;
    std::snprintf(failure.text, sizeof(failure.text), "%s",
                  refused_ == BLOOMERY_RING_AUTHENTICATION ? "a frame whose keyed checksum is wrong"
                                                           : "values that are not finite, or beyond 2^120");
    return false;
}

void Workers::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        wake_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
        if (stop_) return;
        const Piece piece = waiting_.front();
        waiting_.pop_front();
        lock.unlock();
        finish(piece);
        lock.lock();
    }
}

void Workers::finish(const Piece& piece) {
    const int32_t refused = compute(piece);
    bool wake;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        wake = done_.empty();
        done_.push_back(piece);
        if (refused) refused_ = refused;
    }
    const uint64_t one = 1;
    // The write can only fail if 2^64 - 2 wake-ups are pending, and then the reader wakes anyway.
    if (wake && !threads_.empty() && write(lane_.event, &one, sizeof(one)) < 0) return;
}

int32_t Workers::compute(const Piece& piece) const {
    const bool own = piece.stream < 0;
    if (!own && !is_genuine(keys_[static_cast<size_t>(piece.stream)], piece.frame)) return BLOOMERY_RING_AUTHENTICATION;
    const int32_t segment = own ? layout_.index : layout_.received_segment(piece.step);
    const int64_t begin = layout_.chunk_begin(segment, piece.chunk);
    const int64_t length = layout_.chunk_length(segment, piece.chunk);
    uint8_t* payload = piece.frame + kHeaderBytes;
    if (layout_.gathers) {  // the caller checks what the words say: here they are only handed on
        const size_t bytes = sizeof(float) * static_cast<size_t>(length);
        if (own) std::memcpy(payload, call_.values + begin, bytes);
        if (!own) std::memcpy(call_.out + begin, payload, bytes);
        return 0;
    }
    const int32_t last_reducing = layout_.reducing_steps() - 1;
    if (!own && piece.step > last_reducing) {
        return decode(layout_.gather_codec, payload, length, call_.out + begin) ? 0 : BLOOMERY_RING_GARBAGE;
    }
    Hop hop{call_.values + begin, own ? nullptr : payload, payload, nullptr, nullptr, call_.weight};
    const bool is_last = !own && piece.step == last_reducing;
    if (is_last) hop.out = call_.out + begin;
    if (call_.residual && call_.weight != 0.0f) hop.residual = call_.residual + begin;
    return convert(layout_.codec, is_last ? layout_.gather_codec : layout_.codec, hop, length) ? 0 : BLOOMERY_RING_GARBAGE;
}

}  // namespace bloomery
