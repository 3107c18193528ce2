#include "ring_exchange.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "quantise.h"

namespace bloomery {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kLeastSent = 4096;  // with a smaller allowance the rate limit is waited for: tiny segments cost more than they gain
constexpr int64_t kShort = int64_t{1} << 15;  // for arrays up to this many values, threads cost more than they save

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

Exchange::Exchange(Lane& lane, const bloomery_ring_call& call, bloomery_ring_report& report)
    : lane_(lane), call_(call), report_(report), delivery_(lane.next) {
    const bloomery_ring_options& options = lane.options;
    layout_ = {call.count, options.chunk, options.members, options.index, options.codec, gather_codec(options)};
    if (only_gathers(options)) layout_ = {call.count, options.chunk, options.members, options.index, kFp32, kFp32, true};
    if (!layout_.chunk) layout_.chunk = usual_chunk(call.count, options.members, layout_.codec);
    geometry_ = layout_.fingerprint();
    senders_.resize(lane.next.size());
    receivers_.resize(lane.previous.size());
    for (size_t at = 0; at < lane.send_keys.size(); at += kKeyBytes) {
        keys_.push_back(derive_key(lane.send_keys.data() + at, call.epoch));
        receive_keys_.push_back(derive_key(lane.receive_keys.data() + at, call.epoch));
    }
    for (int32_t step = 0; step < layout_.steps(); ++step) {
        seen_from_.push_back(to_receive_);
        to_receive_ += layout_.chunks_of(layout_.received_segment(step));
        to_send_ += layout_.chunks_of(layout_.sent_segment(step));
    }
    seen_.resize(static_cast<size_t>(to_receive_));
    reserve();
    workers_ = std::make_unique<Workers>(lane, layout_, call, call.count > kShort ? options.threads : 0);
}

// If the next member is slow, a member may have to hold all chunks of one segment, one frame for each stream that it
// is reading, and its own frames that are made ahead. With fewer places the ring could deadlock.
void Exchange::reserve() {
    const int64_t values = std::min(layout_.chunk, std::max<int64_t>(1, layout_.count));
    // A few values are longer with a scale than without one.
    const int64_t payload = std::max(encoded_size(layout_.codec, values), encoded_size(layout_.gather_codec, values));
    frame_bytes_ = (static_cast<int64_t>(kHeaderBytes) + payload + kAlignment - 1) / kAlignment * kAlignment;
    own_ahead_ = 2 * static_cast<int64_t>(senders_.size()) + 2 * lane_.options.threads;
    most_held_ = layout_.most_chunks() + static_cast<int64_t>(receivers_.size());
    const int64_t frames = most_held_ + own_ahead_;
    if (lane_.memory_bytes < frames * frame_bytes_) {
        lane_.memory_bytes = 0;
        lane_.memory.reset(new uint8_t[static_cast<size_t>(frames * frame_bytes_)]);
        lane_.memory_bytes = frames * frame_bytes_;
    }
    for (int64_t i = frames; i-- > 0;) free_.push_back(lane_.memory.get() + i * frame_bytes_);
}

int32_t Exchange::run() {
    began_ = now_ = last_sent_ = Clock::now();
    // Neighbours that have not begun are silent, and their kernels soon accept nothing more.
    last_received_ = last_blocked_ =
        began_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(lane_.grace_s));
    while (!failure_.kind && !is_finished()) {
        start_own();
        place_done();
        if (!failure_.kind && !is_finished()) wait();
    }
    workers_.reset();
    report_.kind = failure_.kind;
    report_.culprit = failure_.culprit;
    report_.seconds = seconds(Clock::now() - began_);
    delivery_.report(report_);
    std::memcpy(report_.text, failure_.text, sizeof(report_.text));
    return failure_.kind;
}

bool Exchange::is_finished() const {
    const auto is_done = [](const auto& one) { return one.done; };
    return placed_ == to_receive_ && std::all_of(senders_.begin(), senders_.end(), is_done) &&
           std::all_of(receivers_.begin(), receivers_.end(), is_done);
}

void Exchange::start_own() {
    const int64_t chunks = layout_.chunks_of(layout_.index);
    while (own_started_ < chunks && own_unsent_ < own_ahead_) {
        const Piece piece{free_.back(), 0, own_started_, -1};
        free_.pop_back();
        ++own_started_;
        ++own_unsent_;
        workers_->take(piece);
    }
}

void Exchange::place_done() {
    done_.clear();
    if (!workers_->collect(done_, failure_)) return;
    for (const Piece& piece : done_) {
        if (piece.stream < 0) {
            ready_.push(piece);
            continue;
        }
        ++placed_;
        if (piece.step + 1 < layout_.steps()) {
            ready_.push({piece.frame, piece.step + 1, piece.chunk, piece.stream});
        } else {
            give_back(piece.frame, piece.step + 1);
        }
    }
}

void Exchange::give_back(uint8_t* frame, int32_t step) {
    free_.push_back(frame);
    --(step == 0 ? own_unsent_ : held_);
}

bool Exchange::wants_to_send(const Sender& sender) const {
    if (sender.done) return false;
    return sender.frame || !ready_.empty() || started_ == to_send_ || waiting_due_;
}

void Exchange::wait() {
    const size_t streams = senders_.size();
    std::vector<pollfd> watched(1 + 2 * streams);
    watched[0] = {lane_.event, POLLIN, 0};
    refill_allowance();
    const bool allowed = !(call_.rate_limit_bytes_s > 0) || lane_.allowance >= kLeastSent;
    bool blocked = false;
    for (size_t i = 0; i < streams; ++i) {
        const bool sends = wants_to_send(senders_[i]);
        blocked |= sends && allowed;
        const short asked = static_cast<short>(POLLRDHUP | (sends && allowed ? POLLOUT : 0));
        watched[1 + i] = {senders_[i].done ? -1 : lane_.next[i], asked, 0};
        Receiver& receiver = receivers_[i];
        if (receiver.wants_memory && held_ < most_held_) receive_on(static_cast<int32_t>(i));
        const bool receives = !receiver.done && !receiver.wants_memory;
        watched[1 + streams + i] = {receives ? lane_.previous[i] : -1, POLLIN, 0};
    }
    if (failure_.kind) return;
    if (!blocked) last_blocked_ = std::max(last_blocked_, now_);
    const double due_s = std::clamp(seconds_until_due(), 0.0, 60.0);
    timespec time{static_cast<time_t>(due_s), static_cast<long>(std::fmod(due_s, 1.0) * 1e9)};
    const int found = ppoll(watched.data(), watched.size(), &time, nullptr);
    const Clock::time_point before = now_;
    now_ = Clock::now();
    if (blocked && found >= 0) report_.blocked_s += seconds(now_ - before);
    if (watched[0].revents) {
        uint64_t count;
        if (read(lane_.event, &count, sizeof(count)) < 0 && errno != EAGAIN) return lost(BLOOMERY_RING_NOBODY, errno);
    }
    delivery_.look(now_);
    if (lane_.cancelled) return fail(BLOOMERY_RING_CANCELLED, BLOOMERY_RING_NOBODY, "cancelled");
    for (size_t i = 0; i < streams && !failure_.kind; ++i) {
        if (watched[1 + streams + i].revents) receive_on(static_cast<int32_t>(i));
    }
    // The streams take turns at being first, so that a few frames do not all go over the same one.
    turn_ = (turn_ + 1) % static_cast<int32_t>(streams);
    for (size_t i = 0; i < streams && !failure_.kind; ++i) {
        const size_t stream = (i + static_cast<size_t>(turn_)) % streams;
        const short events = watched[1 + stream].revents;
        if (events & POLLOUT) send_on(static_cast<int32_t>(stream));
        if (!failure_.kind && !senders_[stream].done && (events & (POLLERR | POLLHUP | POLLRDHUP | POLLNVAL))) {
            int error = 0;
            socklen_t size = sizeof(error);
            getsockopt(lane_.next[stream], SOL_SOCKET, SO_ERROR, &error, &size);
            lost(BLOOMERY_RING_NEXT, error);
        }
    }
    if (!failure_.kind) check_clocks();
}

void Exchange::refill_allowance() {
    const double rate = call_.rate_limit_bytes_s;
    if (!(rate > 0)) return;
    const Clock::time_point now = Clock::now();
    const double most = std::max(rate * 0.01, 16.0 * kLeastSent);
    lane_.allowance = std::min(most, lane_.allowance + rate * seconds(now - lane_.allowed_at));
    lane_.allowed_at = now;
}

void Exchange::send_on(int32_t stream) {
    Sender& sender = senders_[static_cast<size_t>(stream)];
    if (!sender.frame && !next_frame(stream)) return;
    size_t bytes = sender.bytes - sender.offset;
    const bool limited = call_.rate_limit_bytes_s > 0;
    if (limited) bytes = std::min(bytes, static_cast<size_t>(std::max(0.0, lane_.allowance)));
    if (bytes == 0) return;
    const int descriptor = lane_.next[static_cast<size_t>(stream)];
    const ssize_t sent = send(descriptor, sender.frame + sender.offset, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR) lost(BLOOMERY_RING_NEXT, errno);
        return;
    }
    if (limited) lane_.allowance -= static_cast<double>(sent);
    last_sent_ = now_;
    last_blocked_ = std::max(last_blocked_, now_);
    report_.sent_bytes += sent;
    sender.offset += static_cast<size_t>(sent);
    if (sender.offset < sender.bytes) return;
    sender.done = sender.ending;
    if (sender.frame != sender.small) {
        Header header;
        std::memcpy(&header, sender.frame, kHeaderBytes);
        give_back(sender.frame, static_cast<int32_t>(header.step));
    }
    sender.frame = nullptr;
}

bool Exchange::next_frame(int32_t stream) {
    Sender& sender = senders_[static_cast<size_t>(stream)];
    if (!ready_.empty()) {
        const Piece piece = ready_.top();
        ready_.pop();
        ++started_;
        start_frame(sender, stream, piece.frame, kData, piece.step, piece.chunk);
        return true;
    }
    if (started_ == to_send_) {
        sender.ending = true;
        start_frame(sender, stream, sender.small, kEnd, 0, 0);
        return true;
    }
    if (!waiting_due_) return false;
    waiting_due_ = false;
    start_frame(sender, stream, sender.small, kWaiting, 0, 0);
    return true;
}

void Exchange::start_frame(Sender& sender, int32_t stream, uint8_t* frame, FrameType type, int32_t step, int64_t chunk) {
    const size_t at = static_cast<size_t>(stream);
    int64_t length = 0;
    if (type == kData) length = encoded_size(layout_.codec_of(step), layout_.chunk_length(layout_.sent_segment(step), chunk));
    const Header header = make_header(expected(lane_.sent[at]++), type, step, chunk, length);
    std::memcpy(frame, &header, kHeaderBytes);
    seal(keys_[at], frame);
    sender.frame = frame;
    sender.offset = 0;
    sender.bytes = kHeaderBytes + static_cast<size_t>(length);
}

void Exchange::receive_on(int32_t stream) {
    Receiver& receiver = receivers_[static_cast<size_t>(stream)];
    // Reads a few frames at once; otherwise a fast connection would need one poll for each frame.
    for (int32_t i = 0; i < 8 && !receiver.done && !failure_.kind; ++i) {
        if (!receiver.frame) {
            if (receiver.offset < kHeaderBytes && !receive_some(stream, receiver.header)) return;
            if (receiver.offset < kHeaderBytes || !accept_header(stream)) return;
            continue;
        }
        if (!receive_some(stream, receiver.frame)) return;
        if (receiver.offset < receiver.bytes) continue;
        Header header;
        std::memcpy(&header, receiver.frame, kHeaderBytes);
        workers_->take({receiver.frame, static_cast<int32_t>(header.step), header.chunk, stream});
        ++completed_;
        receiver.frame = nullptr;
        receiver.bytes = kHeaderBytes;
        receiver.offset = 0;
    }
}

// Returns false if nothing more can be read now.
bool Exchange::accept_header(int32_t stream) {
    Receiver& receiver = receivers_[static_cast<size_t>(stream)];
    uint64_t& sequence = lane_.received[static_cast<size_t>(stream)];
    Header header;
    std::memcpy(&header, receiver.header, kHeaderBytes);
    const Verdict verdict = examine(header, expected(sequence));
    if (verdict != kSound) {
        const int32_t kind = verdict == kReplayed ? BLOOMERY_RING_AUTHENTICATION : BLOOMERY_RING_GARBAGE;
        fail(kind, BLOOMERY_RING_PREVIOUS, "stream %d: %s", stream, describe(verdict));
        return false;
    }
    if (header.type == kData) {
        const size_t place = static_cast<size_t>(seen_from_[header.step] + header.chunk);
        if (seen_[place]) {
            fail(BLOOMERY_RING_GARBAGE, BLOOMERY_RING_PREVIOUS, "chunk %u of step %u came twice", header.chunk, header.step);
            return false;
        }
        receiver.wants_memory = held_ == most_held_;
        if (receiver.wants_memory) return false;
        seen_[place] = true;
        ++held_;
        receiver.frame = free_.back();
        free_.pop_back();
        std::memcpy(receiver.frame, receiver.header, kHeaderBytes);
        receiver.bytes = kHeaderBytes + header.length;
    } else {
        if (!is_genuine(receive_keys_[static_cast<size_t>(stream)], receiver.header)) {
            fail(BLOOMERY_RING_AUTHENTICATION, BLOOMERY_RING_PREVIOUS, "a frame whose keyed checksum is wrong");
            return false;
        }
        receiver.done = header.type == kEnd;
        receiver.offset = 0;
    }
    ++sequence;
    const bool ended = std::all_of(receivers_.begin(), receivers_.end(), [](const Receiver& one) { return one.done; });
    if (ended && completed_ < to_receive_) {
        fail(BLOOMERY_RING_GARBAGE, BLOOMERY_RING_PREVIOUS, "all streams ended after %lld of %lld chunks",
             static_cast<long long>(completed_), static_cast<long long>(to_receive_));
    }
    return true;
}

bool Exchange::receive_some(int32_t stream, uint8_t* to) {
    Receiver& receiver = receivers_[static_cast<size_t>(stream)];
    const int descriptor = lane_.previous[static_cast<size_t>(stream)];
    const ssize_t got = recv(descriptor, to + receiver.offset, receiver.bytes - receiver.offset, MSG_DONTWAIT);
    if (got <= 0) {
        if (got == 0) lost(BLOOMERY_RING_PREVIOUS, 0);
        if (got < 0 && errno != EAGAIN && errno != EINTR) lost(BLOOMERY_RING_PREVIOUS, errno);
        return false;
    }
    receiver.offset += static_cast<size_t>(got);
    report_.received_bytes += got;
    last_received_ = now_;
    return true;
}

void Exchange::check_clocks() {
    const auto is_paused = [](const Receiver& one) { return one.done || one.wants_memory; };
    if (std::all_of(receivers_.begin(), receivers_.end(), is_paused)) last_received_ = std::max(last_received_, now_);
    const double received_s = seconds(now_ - last_received_), blocked_s = seconds(now_ - last_blocked_);
    const bool receiving = received_s >= blocked_s;
    if (std::max(received_s, blocked_s) >= call_.stall_s) {
        return fail(BLOOMERY_RING_STALLED, receiving ? BLOOMERY_RING_PREVIOUS : BLOOMERY_RING_NEXT,
                    receiving ? "nothing came for %.1f s; %lld of %lld chunks had" : "nothing was taken for %.1f s; %lld of %lld chunks had come",
                    std::max(received_s, blocked_s), static_cast<long long>(completed_), static_cast<long long>(to_receive_));
    }
    if (seconds(now_ - began_) >= call_.deadline_s) {
        return fail(BLOOMERY_RING_DEADLINE, completed_ < to_receive_ ? BLOOMERY_RING_PREVIOUS : BLOOMERY_RING_NEXT,
                    "not done after %.1f s: %lld of %lld chunks came, %lld of %lld were sent", seconds(now_ - began_),
                    static_cast<long long>(completed_), static_cast<long long>(to_receive_),
                    static_cast<long long>(started_), static_cast<long long>(to_send_));
    }
    if (started_ < to_send_ && seconds(now_ - last_sent_) >= call_.stall_s / 4) {
        waiting_due_ = true;
        last_sent_ = now_;
    }
}

double Exchange::seconds_until_due() const {
    double due_s = call_.deadline_s - seconds(now_ - began_);
    due_s = std::min(due_s, call_.stall_s - seconds(now_ - std::min(last_received_, last_blocked_)));
    if (started_ < to_send_) due_s = std::min(due_s, call_.stall_s / 4 - seconds(now_ - last_sent_));
    const double rate = call_.rate_limit_bytes_s;
    if (rate > 0 && lane_.allowance < kLeastSent) due_s = std::min(due_s, (kLeastSent - lane_.allowance) / rate);
    return due_s;
}

void Exchange::lost(int32_t culprit, int error) {
    const char* who = culprit == BLOOMERY_RING_NEXT ? "the next" : "the previous";
    if (error == ETIMEDOUT) return fail(BLOOMERY_RING_STALLED, culprit, "%s member acknowledges nothing", who);
    fail(BLOOMERY_RING_CLOSED, culprit, "%s member closed its connection%s%s", who, error ? ": " : "",
         error ? std::strerror(error) : "");
}

void Exchange::fail(int32_t kind, int32_t culprit, const char* format, ...) {
    if (failure_.kind) return;
    failure_.kind = kind;
    failure_.culprit = culprit;
    va_list values;
    va_start(values, format);
    std::vsnprintf(failure_.text, sizeof(failure_.text), format, values);
    va_end(values);
}

Expected Exchange::expected(uint64_t sequence) const {
    return {&layout_, call_.epoch, call_.round, sequence, geometry_, static_cast<uint16_t>(lane_.options.lane)};
}

}  // namespace bloomery
