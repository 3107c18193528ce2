// One all_reduce over connected sockets. The calling thread polls; other threads compute. See docs/notes/ring.md.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

#include "bloomery.h"
#include "frame.h"

namespace bloomery {

using Clock = std::chrono::steady_clock;

inline bool only_gathers(const bloomery_ring_options& options) { return options.codec == BLOOMERY_RING_WORDS; }

inline int32_t gather_codec(const bloomery_ring_options& options) {
    return options.gather ? options.gather - 1 : options.codec;
}

// The state that is kept from one round to the next.
struct Lane {
    bloomery_ring_options options;
    std::vector<int> next, previous;
    std::vector<uint8_t> send_keys, receive_keys;  // kKeyBytes for each connection
    std::vector<uint64_t> sent, received;          // frames on each connection so far
    std::unique_ptr<uint8_t[]> memory;
    int64_t memory_bytes = 0;
    double grace_s = 0;    // by which other members may begin a call later
    double allowance = 0;  // bytes that the rate limit allows to be sent now
    Clock::time_point allowed_at{};
    int event = -1;
    std::atomic<bool> cancelled{false};
};

// Statistics of TCP connections from the kernel: bytes delivered, bytes retransmitted, the best rate.
class Delivery {
   public:
    explicit Delivery(const std::vector<int>& descriptors);
    // Must be called often; it reads the counters four times a second.
    void look(Clock::time_point now);
    void report(bloomery_ring_report& report);

   private:
    // Counts segments that arrived, also out of order, because acknowledged bytes jump when a gap is filled; and the mean
    // size of a segment, by which they become bytes.
    struct Counts {
        int64_t delivered = 0, sent = 0, sent_bytes = 0, lost_bytes = 0;
    };
    // The values of a connection's counters at the beginning. Two of the counters wrap after some terabytes.
    struct Base {
        uint32_t delivered = 0, sent = 0;
        int64_t sent_bytes = 0, lost_bytes = 0;
    };
    Base read(int descriptor) const;
    Counts count() const;  // since the beginning

    const std::vector<int>& descriptors_;
    std::vector<Base> bases_;
    int64_t seen_ = 0;  // segments that had arrived at the last reading
    Clock::time_point looked_;
    double best_ = 0;  // segments a second
};

// A frame in memory, and what has to be done with it.
struct Piece {
    uint8_t* frame;
    int32_t step;
    int64_t chunk;
    int32_t stream;  // the stream that it came from; -1: it is made of own values
};

struct Failure {
    int32_t kind = 0, culprit = 0;
    char text[BLOOMERY_RING_TEXT] = {};
};

// Does the arithmetic of pieces, in its own threads or, without any, in the calling one.
class Workers {
   public:
    Workers(const Lane& lane, const Layout& layout, const bloomery_ring_call& call, int32_t threads);
    ~Workers();
    void take(const Piece& piece);
    // Moves finished pieces into `done`. Returns false if a piece was refused; `failure` then says why.
    bool collect(std::vector<Piece>& done, Failure& failure);

   private:
    void work();
    void finish(const Piece& piece);
    int32_t compute(const Piece& piece) const;

    const Lane& lane_;
    const Layout& layout_;
    const bloomery_ring_call& call_;
    std::vector<MacKey> keys_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Piece> waiting_;
    std::vector<Piece> done_;
    int32_t refused_ = 0;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

class Exchange {
   public:
    Exchange(Lane& lane, const bloomery_ring_call& call, bloomery_ring_report& report);
    // Returns 0 or the kind of failure; it fills the report in both cases. When it returns, all threads have ended.
    int32_t run();

   private:
    struct Sender {
        uint8_t* frame = nullptr;
        size_t bytes = 0, offset = 0;
        bool ending = false, done = false;
        uint8_t small[kHeaderBytes];
    };
    struct Receiver {
        uint8_t header[kHeaderBytes];
        uint8_t* frame = nullptr;
        size_t bytes = kHeaderBytes, offset = 0;
        bool wants_memory = false, done = false;
    };
    struct Later {
        bool operator()(const Piece& left, const Piece& right) const {
            return left.step != right.step ? left.step > right.step : left.chunk > right.chunk;
        }
    };

    void reserve();
    bool is_finished() const;
    void start_own();
    void place_done();
    void give_back(uint8_t* frame, int32_t step);
    void wait();
    void send_on(int32_t stream);
    bool next_frame(int32_t stream);
    void start_frame(Sender& sender, int32_t stream, uint8_t* frame, FrameType type, int32_t step, int64_t chunk);
    void receive_on(int32_t stream);
    bool accept_header(int32_t stream);
    bool receive_some(int32_t stream, uint8_t* to);
    bool wants_to_send(const Sender& sender) const;
    void check_clocks();
    double seconds_until_due() const;
    void refill_allowance();
    void fail(int32_t kind, int32_t culprit, const char* format, ...) __attribute__((format(printf, 4, 5)));
    void lost(int32_t culprit, int error);
    Expected expected(uint64_t sequence) const;

    Lane& lane_;
    const bloomery_ring_call& call_;
    bloomery_ring_report& report_;
    Layout layout_;
    uint32_t geometry_;
    Failure failure_;
    std::vector<MacKey> keys_;
    std::vector<MacKey> receive_keys_;
    std::vector<Sender> senders_;
    std::vector<Receiver> receivers_;
    std::vector<uint8_t*> free_;
    std::priority_queue<Piece, std::vector<Piece>, Later> ready_;
    std::vector<bool> seen_;
    std::vector<int64_t> seen_from_;  // for each step: where its chunks begin in seen_
    std::vector<Piece> done_;
    int64_t frame_bytes_ = 0, own_started_ = 0, own_unsent_ = 0, own_ahead_ = 0, held_ = 0, most_held_ = 0;
    int64_t to_send_ = 0, to_receive_ = 0, started_ = 0, completed_ = 0, placed_ = 0;
    int32_t turn_ = 0;
    bool waiting_due_ = false;
    Clock::time_point began_, now_, last_received_, last_sent_, last_blocked_;
    Delivery delivery_;
    std::unique_ptr<Workers> workers_;
};

}  // namespace bloomery
