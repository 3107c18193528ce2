// Runs the kernels of data, checkpoints and model under a sanitizer. All memory ends at a protected page, because no
// sanitizer sees what tile units read and write. Python's tests compare the results with NumPy and torch.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>

#include "check.h"

namespace {

// `count` values; the last one ends at a protected page.
template <typename T>
class Guarded {
   public:
    explicit Guarded(int64_t count) : count_(count) {
        const int64_t page = sysconf(_SC_PAGESIZE), bytes = count * static_cast<int64_t>(sizeof(T));
        whole_ = (bytes + page - 1) / page * page;
        void* memory = mmap(nullptr, static_cast<size_t>(whole_ + page), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED);
        base_ = static_cast<char*>(memory);
        mapped_ = whole_ + page;
        CHECK(mprotect(base_ + whole_, static_cast<size_t>(page), PROT_NONE) == 0);
        data_ = reinterpret_cast<T*>(base_ + whole_ - bytes);
    }
    Guarded(const Guarded&) = delete;
    ~Guarded() { munmap(base_, static_cast<size_t>(mapped_)); }

    T* data() { return data_; }
    T& operator[](int64_t index) { return data_[index]; }
    int64_t size() const { return count_; }
    bool equals(const Guarded& other) const {
        return count_ == other.count_ && memcmp(data_, other.data_, static_cast<size_t>(count_) * sizeof(T)) == 0;
    }

   private:
    int64_t count_, whole_, mapped_;
    char* base_;
    T* data_;
};

template <typename T>
void test_gather_of(Random& random, int32_t type) {
    for (int turn = 0; turn < 40; ++turn) {
        const int64_t size = 1 + below(random, 5000), count = 1 + below(random, size), rows = 1 + below(random, 9);
        Guarded<T> tokens(size);
        // Every fourth turn has negative tokens, where the type can hold them.
        const T bits = turn % 4 ? std::numeric_limits<T>::max() : static_cast<T>(-1);
        for (int64_t i = 0; i < size; ++i) tokens[i] = static_cast<T>(static_cast<T>(random()) & bits);
        Guarded<int64_t> starts(rows), places(rows);
        Guarded<int32_t> out(rows * count);
        Guarded<uint64_t> largest(rows);
        for (int64_t row = 0; row < rows; ++row) starts[row] = below(random, size - count + 1), places[row] = row;
        for (int64_t row = rows - 1; row > 0; --row) std::swap(places[row], places[below(random, row + 1)]);
        for (int64_t ahead : {0, 3}) {
            CHECK(bloomery_gather(tokens.data(), type, size, rows, starts.data(), places.data(), count, ahead, nullptr, out.data(),
                                  largest.data()) == 0);
            for (int64_t row = 0; row < rows; ++row) {
                const T* const from = tokens.data() + starts[row];
                for (int64_t i = 0; i < count; ++i)
                    CHECK(out[places[row] * count + i] == static_cast<int32_t>(from[i]));
                const auto [low, high] = std::minmax_element(from, from + count);
                CHECK(largest[row] == (*low < 0 ? ~uint64_t{0} : static_cast<uint64_t>(*high)));
            }
        }
        starts[below(random, rows)] = turn % 2 ? size - count + 1 : -1;
        CHECK(bloomery_gather(tokens.data(), type, size, rows, starts.data(), places.data(), count, 0, nullptr, out.data(),
                              largest.data()) == -2);
    }
}

void test_gather() {
    Random random(1);
    test_gather_of<uint8_t>(random, 1);
    test_gather_of<int8_t>(random, 2);
    test_gather_of<int16_t>(random, 3);
    test_gather_of<int32_t>(random, 4);
    test_gather_of<int64_t>(random, 5);
    test_gather_of<uint16_t>(random, 8);
    int64_t zero = 0;
    CHECK(bloomery_gather(&zero, 9, 1, 1, &zero, &zero, 1, 0, nullptr, reinterpret_cast<int32_t*>(&zero),
                          reinterpret_cast<uint64_t*>(&zero)) == -1);
}

void test_gather_documents() {
    Random random(2);
    for (int turn = 0; turn < 60; ++turn) {
        const int64_t documents = 1 + below(random, 40);
        std::vector<int64_t> lengths, begins;
        int64_t size = 0;
        for (int64_t i = 0; i < documents; ++i) {
            begins.push_back(size);
            lengths.push_back(below(random, 60) + (i == 0));
            size += lengths.back();
        }
        Guarded<uint16_t> tokens(size);
        for (int64_t i = 0; i < size; ++i) tokens[i] = static_cast<uint16_t>(random());
        Guarded<char> pointers(8 * documents);  // at any address, because they are unaligned in files
        for (int64_t i = 0; i < documents; ++i) {
            const int64_t byte = 2 * begins[static_cast<size_t>(i)];
            memcpy(pointers.data() + 8 * i, &byte, 8);
        }
        Guarded<uint32_t> order(documents);
        Guarded<int64_t> ends(documents);
        for (int64_t i = 0; i < documents; ++i) order[i] = static_cast<uint32_t>(i);
        for (int64_t i = documents - 1; i > 0; --i) std::swap(order[i], order[below(random, i + 1)]);
        std::vector<uint16_t> row;
        for (int64_t i = 0; i < documents; ++i) {
            const auto document = static_cast<size_t>(order[i]);
            for (int64_t k = 0; k < lengths[document]; ++k) row.push_back(tokens[begins[document] + k]);
            ends[i] = static_cast<int64_t>(row.size());
        }
        const int64_t count = 1 + below(random, size), rows = 1 + below(random, 5);
        Guarded<int64_t> starts(rows), places(rows);
        Guarded<int32_t> out(rows * count);
        Guarded<uint64_t> largest(rows);
        for (int64_t i = 0; i < rows; ++i) starts[i] = below(random, size - count + 1), places[i] = rows - 1 - i;
        for (int64_t ahead : {0, 2}) {
            CHECK(bloomery_gather_documents(tokens.data(), 8, rows, starts.data(), places.data(), count, ahead,
                                            nullptr, pointers.data(), order.data(), ends.data(), documents, out.data(),
                                            largest.data()) == 0);
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t k = 0; k < count; ++k)
                    CHECK(out[places[i] * count + k] == row[static_cast<size_t>(starts[i] + k)]);
        }
        starts[0] = size - count + 1;
        CHECK(bloomery_gather_documents(tokens.data(), 8, rows, starts.data(), places.data(), count, 0, nullptr, pointers.data(),
                                        order.data(), ends.data(), documents, out.data(), largest.data()) == -2);
    }
}

// All threads read a whole file whose pages have not been checked yet; then one byte is changed.
void test_pages() {
    Random random(6);
    for (int turn = 0; turn < 30; ++turn) {
        const int64_t bytes = 2 * (1 + below(random, 50000)), count = (bytes + 4095) / 4096;
        Guarded<char> content(bytes);
        for (int64_t i = 0; i < bytes; ++i) content[i] = static_cast<char>(random());
        Guarded<uint32_t> sums(count), other(count);
        CHECK(bloomery_page_sums(content.data(), bytes, 0, sums.data()) == 0);
        for (int32_t instructions : {1, 2}) {
            CHECK(bloomery_page_sums(content.data(), bytes, instructions, other.data()) == 0);
            CHECK(other.equals(sums));
        }
        Guarded<uint64_t> checked(count / 64 + 1);
        const bloomery_pages pages{content.data(), bytes, sums.data(), checked.data()};
        const int64_t tokens = bytes / 2, length = 1 + below(random, tokens), rows = 4;
        std::vector<std::thread> threads;
        for (uint64_t seed = 0; seed < 3; ++seed) {
            threads.emplace_back([&, seed] {
                Random own(seed);
                std::vector<int64_t> starts, places;
                for (int64_t row = 0; row < rows; ++row) starts.push_back(below(own, tokens - length + 1)), places.push_back(row);
                std::vector<int32_t> out(static_cast<size_t>(rows * length));
                std::vector<uint64_t> largest(rows);
                CHECK(bloomery_gather(content.data(), 8, tokens, rows, starts.data(), places.data(), length, 0, &pages,
                                      out.data(), largest.data()) == 0);
                const int64_t begin = 0;
                CHECK(bloomery_check_pages(&pages, 1, &begin, &bytes) == 0);
            });
        }
        for (std::thread& thread : threads) thread.join();
        int64_t marked = 0;
        for (int64_t i = 0; i < checked.size(); ++i) marked += __builtin_popcountll(checked[i]), checked[i] = 0;
        CHECK(marked == count);
        const int64_t place = below(random, bytes), beyond = bytes + 1;
        content[place] ^= static_cast<char>(1 << below(random, 8));
        CHECK(bloomery_check_pages(&pages, 1, &place, &bytes) == -3);
        CHECK(bloomery_check_pages(&pages, 1, &place, &beyond) == -2);
        const int64_t start = place / 2, zero = 0;
        int32_t token;
        uint64_t largest;
        CHECK(bloomery_gather(content.data(), 8, tokens, 1, &start, &zero, 1, 0, &pages, &token, &largest) == -3);
        // Tokens may begin after a header: the pages of the file are checked that are read.
        const int64_t header = below(random, start + 1), behind = start - header;
        const char* const first = content.data() + 2 * header;
        CHECK(bloomery_gather(first, 8, tokens - header, 1, &behind, &zero, 1, 0, &pages, &token, &largest) == -3);
    }
}

void test_stream_copy() {
    Random random(3);
    for (int turn = 0; turn < 300; ++turn) {
        const int64_t bytes = turn < 200 ? turn : below(random, 1 << 17);
        Guarded<char> from(bytes + 1), to(bytes + 1);
        for (int64_t i = 0; i <= bytes; ++i) from[i] = static_cast<char>(random()), to[i] = 0;
        bloomery_stream_copy(to.data() + 1, from.data() + 1, bytes);
        CHECK(to[0] == 0 && memcmp(to.data() + 1, from.data() + 1, static_cast<size_t>(bytes)) == 0);
    }
}

// Does what GOMP_parallel does, with threads that a sanitizer sees.
void in_threads(void (*work)(void*), void* argument, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(work, argument);
    work(argument);
    for (std::thread& other : others) other.join();
}

uint16_t as_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return static_cast<uint16_t>(bits >> 16);
}

void fill(Random& random, Guarded<uint16_t>& values) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < values.size(); ++i) values[i] = as_bf16(normal(random));
}

void test_attention() {
    Random random(4);
    for (int turn = 0; turn < 24; ++turn) {
        const int64_t group = 1 + below(random, 3), kv_heads = 1 + below(random, 3), heads = group * kv_heads;
        const int64_t samples = 1 + below(random, 2), length = 1 + below(random, turn < 20 ? 150 : 700);
        const int64_t width = 2 * (1 + below(random, 40));
        const int64_t queries = samples * length * heads * width, keys = samples * length * kv_heads * width;
        Guarded<uint16_t> query(queries), key(keys), value(keys), slope(queries), out(queries), again(queries);
        Guarded<uint16_t> query_slope(queries), key_slope(keys), value_slope(keys);
        Guarded<uint16_t> query_again(queries), key_again(keys), value_again(keys);
        Guarded<float> partition(samples * heads * length);
        Guarded<float> cosines(length * width / 2), sines(length * width / 2);
        for (auto* one : {&query, &key, &value, &slope}) fill(random, *one);
        for (int64_t i = 0; i < cosines.size(); ++i) cosines[i] = 0.6f, sines[i] = 0.8f;
        const auto vectors = [&](Guarded<uint16_t>& of, int64_t of_heads) {
            return bloomery_vectors{of.data(), length * of_heads * width, of_heads * width};
        };
        bloomery_attention call{};
        call.samples = samples, call.length = length, call.heads = heads, call.kv_heads = kv_heads, call.width = width;
        call.scale = 0.25f;
        if (turn % 2) call.cosines = cosines.data(), call.sines = sines.data();
        call.query = vectors(query, heads), call.key = vectors(key, kv_heads), call.value = vectors(value, kv_heads);
        call.log_partition = partition.data();
        call.out_gradient = vectors(slope, heads);
        for (const bool alone : {true, false}) {
            call.threads = alone ? 1 : 3;
            call.parallel = alone ? nullptr : in_threads;
            call.out = vectors(alone ? out : again, heads);
            call.query_gradient = vectors(alone ? query_slope : query_again, heads);
            call.key_gradient = vectors(alone ? key_slope : key_again, kv_heads);
            call.value_gradient = vectors(alone ? value_slope : value_again, kv_heads);
            CHECK(bloomery_attend(&call) == 0);
            CHECK(bloomery_attend_backward(&call) == 0);
        }
        CHECK(again.equals(out) && query_again.equals(query_slope) && key_again.equals(key_slope));
        CHECK(value_again.equals(value_slope));
        call.width = 3;
        CHECK(bloomery_attend(&call) == -1);
    }
}

void test_entropy() {
    Random random(5);
    for (int turn = 0; turn < 40; ++turn) {
        const int64_t rows = 1 + below(random, 9), vocabulary = 1 + below(random, turn < 30 ? 100 : 5000);
        Guarded<uint16_t> logits(rows * vocabulary), slopes(rows * vocabulary);
        Guarded<int64_t> targets(rows);
        Guarded<float> entropy(rows), z(rows), entropy_again(rows), z_again(rows);
        fill(random, logits);
        for (int64_t row = 0; row < rows; ++row) targets[row] = below(random, vocabulary + 2) - 1;
        bloomery_entropy call{};
        call.rows = rows, call.vocabulary = vocabulary, call.z_loss = 1e-4f;
        call.logits = logits.data(), call.targets = targets.data(), call.slopes = slopes.data();
        for (int64_t row = 0; row < rows; ++row) entropy[row] = z[row] = std::numeric_limits<float>::quiet_NaN();
        call.threads = 1, call.cross_entropy = entropy.data(), call.z = z.data();
        CHECK(bloomery_slope_entropy(&call) == 0);
        call.threads = 3, call.parallel = in_threads, call.slopes = logits.data();  // in place
        call.cross_entropy = entropy_again.data(), call.z = z_again.data();
        CHECK(bloomery_slope_entropy(&call) == 0);
        CHECK(slopes.equals(logits) && entropy.equals(entropy_again) && z.equals(z_again));
        for (int64_t row = 0; row < rows; ++row) {
            const bool counts = targets[row] >= 0 && targets[row] < vocabulary;
            CHECK(counts || (entropy[row] == 0.0f && z[row] == 0.0f));
        }
    }
}

}  // namespace

int main() {
    test_gather();
    test_gather_documents();
    test_pages();
    test_stream_copy();
    if (bloomery_attention_units()) {
        test_attention();
        test_entropy();
        std::puts("all kernels held");
    } else {
        std::puts("the kernels held that this processor has");
    }
    return 0;
}
