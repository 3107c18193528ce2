// Hosts on an emulated wide-area network: a TUN device for each, and packets carried between them at a rate and with a
// delay, from one core. The kernel's own means for that, netem, is missing from many kernels.
//
//   link_emulator HOSTS RATE_MBIT ONE_WAY_MS QUEUE_MS OFFLOAD NAME
//
// What host i sends (10.78.0.(i+1), device NAME<i>) leaves at RATE_MBIT, waits behind what it sent before up to QUEUE_MS and
// is dropped beyond, and arrives ONE_WAY_MS later. OFFLOAD 1: devices take and give TCP segments unsplit, as network cards
// with segmentation offload do; the rate counts the packets that a wire would carry. Prints "ready".
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr size_t kLargest = 1 << 17;
constexpr int kAtOnce = 64;  // packets taken from one host before others have their turn

// Before each packet of a device with IFF_VNET_HDR: virtio_net_hdr of linux/virtio_net.h, which is no C++.
struct OffloadHeader {
    uint8_t flags, gso_type;
    uint16_t headers, gso_size, checksum_start, checksum_offset;
};
static_assert(sizeof(OffloadHeader) == 10);

volatile sig_atomic_t stopped = 0;

struct Packet {
    double due_s;
    int to;
    std::vector<char> bytes;
};

struct Host {
    int device = -1;
    double free_at_s = 0;
    std::deque<Packet> under_way;
    uint64_t packets = 0, dropped = 0;
};

double now_s() { return Seconds(Clock::now().time_since_epoch()).count(); }

int open_device(const char* name, size_t number, bool offload) {
    const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    ifreq request{};
    request.ifr_flags = static_cast<short>(IFF_TUN | IFF_NO_PI | (offload ? IFF_VNET_HDR : 0));
    std::snprintf(request.ifr_name, IFNAMSIZ, "%s%zu", name, number);
    if (device < 0 || ioctl(device, TUNSETIFF, &request) < 0) return -1;
    if (offload && ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0) return -1;
    return device;
}

// Packets that a wire would carry for what was read, and their bytes.
void measure(const char* packet, size_t bytes, const OffloadHeader& offload, uint64_t& packets, double& wire_bytes) {
    packets = 1;
    wire_bytes = static_cast<double>(bytes);
    if (!offload.gso_type || !offload.gso_size) return;
    const size_t network = static_cast<size_t>(packet[0] & 15) * 4;
    const size_t headers = network + static_cast<size_t>(static_cast<uint8_t>(packet[network + 12]) >> 4) * 4;
    packets = (bytes - headers + offload.gso_size - 1) / offload.gso_size;
    wire_bytes += static_cast<double>((packets - 1) * headers);
}

}  // namespace

int main(int count, char** values) {
    if (count != 7) return std::fprintf(stderr, "usage: link_emulator HOSTS RATE_MBIT ONE_WAY_MS QUEUE_MS OFFLOAD NAME\n"), 2;
    const double rate_bytes_s = std::atof(values[2]) * 125e3, delay_s = std::atof(values[3]) * 1e-3;
    const double queue_s = std::atof(values[4]) * 1e-3;
    const bool offload = std::atoi(values[5]) != 0;
    const size_t before = offload ? sizeof(OffloadHeader) : 0;
    std::vector<Host> hosts(static_cast<size_t>(std::atoi(values[1])));
    std::vector<pollfd> watched;
    for (size_t i = 0; i < hosts.size(); ++i) {
        hosts[i].device = open_device(values[6], i, offload);
        if (hosts[i].device < 0) return std::perror("no TUN device"), 1;
        watched.push_back({hosts[i].device, POLLIN, 0});
    }
    for (const int one : {SIGTERM, SIGINT}) signal(one, [](int) { stopped = 1; });
    prctl(PR_SET_TIMERSLACK, 1000);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    std::printf("ready\n");
    std::fflush(stdout);
    std::vector<char> buffer(kLargest);
    while (!stopped) {
        double next_s = now_s() + 1;
        for (const Host& host : hosts) {
            if (!host.under_way.empty()) next_s = std::min(next_s, host.under_way.front().due_s);
        }
        const double wait_s = std::max(0.0, next_s - now_s());
        const timespec time{static_cast<time_t>(wait_s), static_cast<long>(std::fmod(wait_s, 1.0) * 1e9)};
        if (ppoll(watched.data(), watched.size(), &time, nullptr) < 0) continue;
        for (size_t i = 0; i < hosts.size(); ++i) {
            Host& host = hosts[i];
            for (int k = 0; watched[i].revents && k < kAtOnce; ++k) {
                const ssize_t got = read(host.device, buffer.data(), buffer.size());
                if (got <= static_cast<ssize_t>(before + 20)) break;
                const char* packet = buffer.data() + before;
                if ((packet[0] >> 4) != 4) continue;
                const int to = static_cast<uint8_t>(packet[19]) - 1;
                if (to < 0 || to >= static_cast<int>(hosts.size())) continue;
                OffloadHeader header{};
                std::memcpy(&header, buffer.data(), before);
                uint64_t packets;
                double wire_bytes;
                measure(packet, static_cast<size_t>(got) - before, header, packets, wire_bytes);
                const double now = now_s(), begins = std::max(now, host.free_at_s);
                host.packets += packets;
                if (begins - now > queue_s) {
                    host.dropped += packets;
                    continue;
                }
                host.free_at_s = begins + wire_bytes / rate_bytes_s;
                host.under_way.push_back({host.free_at_s + delay_s, to, {buffer.data(), buffer.data() + got}});
            }
        }
        const double now = now_s();
        for (Host& host : hosts) {
            while (!host.under_way.empty() && host.under_way.front().due_s <= now) {
                const Packet& packet = host.under_way.front();
                const int device = hosts[static_cast<size_t>(packet.to)].device;
                if (write(device, packet.bytes.data(), packet.bytes.size()) < 0) ++host.dropped;
                host.under_way.pop_front();
            }
        }
    }
    for (size_t i = 0; i < hosts.size(); ++i) {
        std::printf("%zu %llu %llu\n", i, static_cast<unsigned long long>(hosts[i].packets),
                    static_cast<unsigned long long>(hosts[i].dropped));
    }
    return 0;
}
