// Runs the ring and its codecs under sanitizers: with every size, many threads, and calls that are cancelled half way.
//
//     ring_tests [SEED]       runs each test once
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "../src/frame.h"
#include "../src/quantise.h"
#include "check.h"

using namespace bloomery;

namespace {

void codecs_touch_no_byte_beyond_their_arrays(Random& random) {
    for (int32_t codec = kFp32; codec <= kInt4; ++codec) {
        for (int64_t count = 0; count < 1100; count += 1 + below(random, 9)) {
            const std::vector<float> values = normal_values(random, count);
            const std::unique_ptr<uint8_t[]> encoded(new uint8_t[static_cast<size_t>(encoded_size(codec, count))]);
            const std::unique_ptr<float[]> out(new float[static_cast<size_t>(count)]), residual(new float[static_cast<size_t>(count)]());
            const Hop hop{values.data(), nullptr, encoded.get(), out.get(), residual.get(), 1.0f};
            CHECK(combine(codec, hop, count));
            for (int64_t i = 0; i < count; ++i) {
                CHECK(std::fabs(out[i] + residual[i] - values[static_cast<size_t>(i)]) < 1e-5f);
            }
            const std::unique_ptr<float[]> again(new float[static_cast<size_t>(count)]);
            CHECK(decode(codec, encoded.get(), count, again.get()));
            CHECK(std::memcmp(again.get(), out.get(), static_cast<size_t>(4 * count)) == 0);
            CHECK(accumulate(codec, encoded.get(), count, again.get()));
        }
    }
}

void codecs_work_at_any_address(Random& random) {
    const std::vector<float> values = normal_values(random, 2000);
    std::vector<uint8_t> encoded(static_cast<size_t>(encoded_size(kFp32, 2000)) + 8);
    std::vector<float> out(2000);
    for (int32_t codec = kFp32; codec <= kInt4; ++codec) {
        for (size_t shift = 0; shift < 4; ++shift) {
            const Hop hop{values.data() + shift, nullptr, encoded.data() + shift, nullptr, nullptr, 0.5f};
            CHECK(combine(codec, hop, 1900));
            CHECK(decode(codec, encoded.data() + shift, 1900, out.data() + shift));
        }
    }
}

bool are_equal(const std::vector<float>& left, const std::vector<float>& right) {
    return left.empty() || std::memcmp(left.data(), right.data(), 4 * left.size()) == 0;
}

// On a processor without a version of its own, both are the portable code.
void what_is_written_for_one_processor_changes_no_bit(Random& random) {
    for (int64_t count = 0; count < 2600; count += 1 + below(random, 90)) {
        const size_t size = static_cast<size_t>(count), bytes = static_cast<size_t>(encoded_size(kInt8, count));
        std::vector<float> own = normal_values(random, count);
        for (float& value : own) value = std::ldexp(value, static_cast<int>(below(random, 40)) - 20);
        for (int64_t i = 0; i < std::min<int64_t>(count, 600); ++i) own[static_cast<size_t>(i)] *= below(random, 3) ? 0.0f : 0x1p-99f;
        std::vector<uint8_t> received(bytes);
        const std::vector<float> others = normal_values(random, count);
        CHECK(portable::combine(kInt8, Hop{others.data(), nullptr, received.data(), nullptr, nullptr, 1.0f}, count));
        for (int kind = 0; kind < 16; ++kind) {
            std::vector<float> outs[2] = {own, own}, residuals[2] = {others, others};
            std::vector<uint8_t> encoded[2] = {received, received};  // in place, as with frames
            bool sound[2];
            for (size_t i = 0; i < 2; ++i) {
                const Hop hop{kind & 1 ? outs[i].data() : own.data(),      kind & 2 ? encoded[i].data() : nullptr,
                              encoded[i].data(),                           kind & 5 ? outs[i].data() : nullptr,
                              kind & 8 ? residuals[i].data() : nullptr,    kind & 4 ? 1.0f : 0.3f};
                sound[i] = i ? combine(kInt8, hop, count) : portable::combine(kInt8, hop, count);
            }
            CHECK(sound[0] && sound[1] && encoded[0] == encoded[1]);
            CHECK(are_equal(outs[0], outs[1]) && are_equal(residuals[0], residuals[1]));
            CHECK(portable::decode(kInt8, encoded[0].data(), count, outs[0].data()));
            CHECK(decode(kInt8, encoded[0].data(), count, outs[1].data()) && are_equal(outs[0], outs[1]));
            CHECK(portable::accumulate(kInt8, received.data(), count, outs[0].data()));
            CHECK(accumulate(kInt8, received.data(), count, outs[1].data()) && are_equal(outs[0], outs[1]));
        }
        if (!count) continue;
        own[static_cast<size_t>(below(random, count))] = below(random, 2) ? NAN : -INFINITY;
        CHECK(!combine(kInt8, Hop{own.data(), nullptr, received.data(), nullptr, nullptr, 1.0f}, count));
        received.assign(bytes, 0xFF);
        CHECK(!decode(kInt8, received.data(), count, own.data()));
        own.assign(size, 1.0f);
        CHECK(!accumulate(kInt8, received.data(), count, own.data()));
    }
}

// A peer may send any scale: it must be one that `combine` could have written, in each block of a group.
void an_unsound_scale_of_any_block_is_refused(Random& random) {
    const uint32_t largest = 0x7B800000u;  // the bits of 2^120
    for (const int32_t codec : {kInt8, kInt4}) {
        const int64_t block = codec == kInt8 ? 512 : 128, stride = 4 + (codec == kInt8 ? block : block / 2);
        const int64_t count = 4 * 512 + 128 + 1 + below(random, 100);
        const std::vector<float> values = normal_values(random, count);
        std::vector<uint8_t> sent(static_cast<size_t>(encoded_size(codec, count)));
        CHECK(combine(codec, Hop{values.data(), nullptr, sent.data(), nullptr, nullptr, 1.0f}, count));
        for (int64_t at = 0; at * block < count; ++at) {
            for (const uint32_t bits : {largest, largest + 1, 0x7F800000u, 0x7FC00000u, 0x80000000u, 0xBF800000u}) {
                std::vector<uint8_t> received = sent;
                std::memcpy(received.data() + at * stride, &bits, 4);
                std::vector<float> out(static_cast<size_t>(count)), sum(static_cast<size_t>(count), 1.0f);
                const bool sound = bits == largest;
                CHECK(decode(codec, received.data(), count, out.data()) == sound);
                CHECK(portable::decode(codec, received.data(), count, out.data()) == sound);
                if (sound) continue;  // the sum of such values is beyond the bound
                CHECK(!accumulate(codec, received.data(), count, sum.data()));
                CHECK(!portable::accumulate(codec, received.data(), count, sum.data()));
                const Hop hop{values.data(), received.data(), received.data(), nullptr, nullptr, 1.0f};
                CHECK(!combine(codec, hop, count));
            }
        }
    }
}

void layouts_hold_every_value_once(Random& random) {
    for (int i = 0; i < 2000; ++i) {
        const int64_t count = below(random, 1 << (1 + below(random, 30)));
        const int32_t members = static_cast<int32_t>(2 + below(random, 9));
        const Layout layout{count, 512 * (1 + below(random, 200)), members, static_cast<int32_t>(below(random, members)), kInt8, kInt8};
        int64_t at = 0, most = 0;
        for (int32_t segment = 0; segment < members; ++segment) {
            CHECK(layout.begin_of(segment) == at);
            CHECK(layout.chunks_of(segment) <= layout.most_chunks());
            most = std::max(most, layout.chunks_of(segment));
            for (int64_t chunk = 0; chunk < layout.chunks_of(segment); ++chunk) {
                CHECK(layout.chunk_begin(segment, chunk) == at);
                const int64_t length = layout.chunk_length(segment, chunk);
                CHECK(length > 0 && length <= layout.chunk);
                at += length;
            }
        }
        CHECK(at == count && most == layout.most_chunks());
        for (int32_t step = 0; step + 1 < layout.steps(); ++step) {
            CHECK(layout.received_segment(step) == layout.sent_segment(step + 1));
        }
    }
}

void rings_agree_to_the_bit(Random& random) {
    for (int round = 0; round < 24; ++round) {
        const int32_t size = static_cast<int32_t>(2 + below(random, 3)), codec = round % 4;
        const int64_t chunk = round % 3 ? 512 * (1 + below(random, 8)) : 0;
        const int32_t gather = round % 2 ? 0 : 1 + codec + static_cast<int32_t>(below(random, 4 - codec));  // no more bytes
        Members members(size, static_cast<int32_t>(1 + below(random, 3)), codec, static_cast<int32_t>(below(random, 3)), chunk,
                        gather);
        for (uint64_t number = 0; number < 3; ++number) {
            const int64_t count = number == 1 ? below(random, 12) : below(random, 40'000);
            std::vector<std::vector<float>> values;
            for (int32_t i = 0; i < size; ++i) values.push_back(normal_values(random, count));
            std::vector<std::thread> threads;
            for (int32_t i = 0; i < size; ++i) {
                threads.emplace_back([&, i] {
                    float* own = values[static_cast<size_t>(i)].data();
                    bloomery_ring_call call = call_of(own, own, count);
                    call.round = number;
                    bloomery_ring_report report = empty_report();
                    CHECK(bloomery_ring_all_reduce(members.rings[static_cast<size_t>(i)], &call, &report) == 0);
                });
            }
            for (std::thread& thread : threads) thread.join();
            for (int32_t i = 1; i < size; ++i) {
                const size_t bytes = static_cast<size_t>(4 * count);
                CHECK(bytes == 0 || std::memcmp(values[0].data(), values[static_cast<size_t>(i)].data(), bytes) == 0);
            }
        }
    }
}

// Frees the arrays as soon as `cancel` returns, while the thread of the call may not have returned yet.
void after_cancelling_nothing_touches_the_arrays(Random& random) {
    for (int round = 0; round < 25; ++round) {
        Members members(2, 2, kInt8, round % 3, 512);
        const int64_t count = 200'000;
        std::unique_ptr<std::vector<float>> values = std::make_unique<std::vector<float>>(normal_values(random, count));
        bloomery_ring_call call = call_of(values->data(), values->data(), count);
        bloomery_ring_report report = empty_report();
        std::thread caller([&] {
            const int32_t kind = bloomery_ring_all_reduce(members.rings[0], &call, &report);
            CHECK(kind == BLOOMERY_RING_CANCELLED);
        });
        char byte;
        if (round % 2) CHECK(recv(members.hop(0, 0).right, &byte, 1, 0) == 1);  // half way; otherwise at any time
        CHECK(bloomery_ring_cancel(members.rings[0]) == 0);
        values.reset();
        caller.join();
    }
}

void a_connection_lost_at_any_byte_ends_every_call(Random& random) {
    for (int round = 0; round < 25; ++round) {
        Members members(3, 2, round % 4, round % 2, 512);
        const int64_t count = 60'000;
        std::atomic<int> ended{0};
        std::vector<std::thread> threads;
        std::vector<std::vector<float>> values;
        for (int32_t i = 0; i < 3; ++i) values.push_back(normal_values(random, count));
        for (int32_t i = 0; i < 3; ++i) {
            threads.emplace_back([&, i] {
                float* own = values[static_cast<size_t>(i)].data();
                bloomery_ring_call call = call_of(own, own, count);
                bloomery_ring_report report = empty_report();
                const int32_t kind = bloomery_ring_all_reduce(members.rings[static_cast<size_t>(i)], &call, &report);
                CHECK(kind == 0 || kind == BLOOMERY_RING_CLOSED);
                // Closes the connections that failed, as a caller does, so that the others notice.
                for (int32_t s = 0; kind && s < 2; ++s) {
                    shutdown(members.hop(i, s).left, SHUT_RDWR);
                    shutdown(members.hop((i + 2) % 3, s).right, SHUT_RDWR);
                }
                ++ended;
            });
        }
        for (int64_t i = below(random, 2000); i > 0 && ended == 0; --i) std::this_thread::yield();
        shutdown(members.hop(static_cast<int32_t>(below(random, 3)), 1).left, SHUT_RDWR);
        for (std::thread& thread : threads) thread.join();
        CHECK(ended == 3);
    }
}

void arguments_out_of_bounds_are_refused() {
    CHECK(bloomery_ring_create(nullptr) == nullptr);
    bloomery_ring_options options{};
    CHECK(bloomery_ring_create(&options) == nullptr);
    Members members(2, 1, kInt8, 0, 0);
    bloomery_ring_report report = empty_report();
    CHECK(bloomery_ring_all_reduce(members.rings[0], nullptr, &report) == BLOOMERY_RING_BAD_ARGUMENT);
    bloomery_ring_call call = call_of(nullptr, nullptr, 5);
    CHECK(bloomery_ring_all_reduce(members.rings[0], &call, &report) == BLOOMERY_RING_BAD_ARGUMENT);
    float value = NAN;
    call = call_of(&value, &value, 1);
    CHECK(bloomery_ring_all_reduce(members.rings[0], &call, &report) == BLOOMERY_RING_NOT_FINITE);
}

}  // namespace

int main(int count, char** arguments) {
    Random random(count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1);
    codecs_touch_no_byte_beyond_their_arrays(random);
    codecs_work_at_any_address(random);
    what_is_written_for_one_processor_changes_no_bit(random);
    an_unsound_scale_of_any_block_is_refused(random);
    layouts_hold_every_value_once(random);
    rings_agree_to_the_bit(random);
    after_cancelling_nothing_touches_the_arrays(random);
    a_connection_lost_at_any_byte_ends_every_call(random);
    arguments_out_of_bounds_are_refused();
    std::puts("ring: ok");
}
