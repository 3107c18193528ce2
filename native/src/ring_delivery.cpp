// TCP_INFO of a ring's connections to the next member.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

#include "ring_exchange.h"

namespace bloomery {
namespace {

constexpr std::chrono::milliseconds kEvery{250};

}  // namespace

Delivery::Delivery(const std::vector<int>& descriptors)
    : descriptors_(descriptors), first_(count()), last_(first_), looked_(Clock::now()) {}

// A kernel that does not know a field leaves it out, and it stays 0.
Delivery::Counts Delivery::count() const {
    Counts counts;
    for (const int descriptor : descriptors_) {
        tcp_info info{};
        socklen_t size = sizeof(info);
        if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size)) continue;
        counts.delivered += info.tcpi_delivered;
        counts.sent += info.tcpi_data_segs_out;
        counts.sent_bytes += static_cast<int64_t>(info.tcpi_bytes_sent);
        counts.lost_bytes += static_cast<int64_t>(info.tcpi_bytes_retrans);
    }
    return counts;
}

void Delivery::look(Clock::time_point now) {
    if (now - looked_ < kEvery) return;
    const Counts counts = count();
    const double elapsed_s = std::chrono::duration<double>(now - looked_).count();
    best_ = std::max(best_, static_cast<double>(counts.delivered - last_.delivered) / elapsed_s);
    last_ = counts;
    looked_ = now;
}

void Delivery::report(bloomery_ring_report& report) {
    const Counts counts = count();
    const double sent = static_cast<double>(std::max<int64_t>(1, counts.sent - first_.sent));
    const double segment_bytes = static_cast<double>(counts.sent_bytes - first_.sent_bytes) / sent;
    report.delivered_bytes = static_cast<int64_t>(static_cast<double>(counts.delivered - first_.delivered) * segment_bytes);
    report.lost_bytes = counts.lost_bytes - first_.lost_bytes;
    report.best_bytes_s = best_ * segment_bytes;
}

}  // namespace bloomery
