// Reads TCP_INFO of a ring's connections to the next member.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

#include "ring_exchange.h"

namespace bloomery {
namespace {

constexpr std::chrono::milliseconds kEvery{250};

}  // namespace

Delivery::Delivery(const std::vector<int>& descriptors) : descriptors_(descriptors), looked_(Clock::now()) {
    for (const int descriptor : descriptors_) bases_.push_back(read(descriptor));
}

// A kernel that does not know a field leaves it out; the field stays 0.
Delivery::Base Delivery::read(int descriptor) const {
    tcp_info info{};
    socklen_t size = sizeof(info);
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size)) return {};
    return {info.tcpi_delivered, info.tcpi_data_segs_out, static_cast<int64_t>(info.tcpi_bytes_sent),
            static_cast<int64_t>(info.tcpi_bytes_retrans)};
}

Delivery::Counts Delivery::count() const {
    Counts counts;
    for (size_t i = 0; i < descriptors_.size(); ++i) {
        const Base now = read(descriptors_[i]), &base = bases_[i];
        counts.delivered += static_cast<uint32_t>(now.delivered - base.delivered);
        counts.sent += static_cast<uint32_t>(now.sent - base.sent);
        counts.sent_bytes += now.sent_bytes - base.sent_bytes;
        counts.lost_bytes += now.lost_bytes - base.lost_bytes;
    }
    return counts;
}

void Delivery::look(Clock::time_point now) {
    if (now - looked_ < kEvery) return;
    const int64_t delivered = count().delivered;
    now = Clock::now();  // taken after the counters, so that what arrived meanwhile is counted
    best_ = std::max(best_, static_cast<double>(delivered - seen_) / std::chrono::duration<double>(now - looked_).count());
    seen_ = delivered;
    looked_ = now;
}

void Delivery::report(bloomery_ring_report& report) {
    const Counts counts = count();
    const double segment_bytes = static_cast<double>(counts.sent_bytes) / static_cast<double>(std::max<int64_t>(1, counts.sent));
    report.delivered_bytes = static_cast<int64_t>(static_cast<double>(counts.delivered) * segment_bytes);
    report.lost_bytes = counts.lost_bytes;
    report.best_bytes_s = best_ * segment_bytes;
}

}  // namespace bloomery
