// Mixtures that keep every dataset within one sample of its share at every sample. bloomery/data/fair_quotas.py has
// the same arithmetic in Python, and the proof. A dataset with share n / one is due n * t / one samples after t
// samples of the stream.
#include <algorithm>
#include <exception>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "bloomery.h"

namespace {

using Wide = __int128;

// One sample of a dataset, which may take a slot from `release` on and must take one before `deadline`.
struct Job {
    int32_t release, deadline, dataset;
};

// The samples of one dataset in a block, in order. The next one is released at `at + rest / share`.
struct Series {
    int64_t at, rest, step, step_rest, share, left;  // left: samples that are not drawn yet
    int32_t dataset;
};

// The free slots of a block, as bits.
class FreeSlots {
  public:
    explicit FreeSlots(int64_t size) : free_(static_cast<size_t>(size / 64) + 2, ~uint64_t{0}) {}

    // Takes the first free slot from `release` on and returns it. Beyond the block's end every slot is free.
    int64_t take(int64_t release) {
        const int64_t from = std::max(release, taken_below_);
        size_t word = static_cast<size_t>(from) / 64;
        uint64_t bits = free_[word] & (~uint64_t{0} << (from & 63));
        while (bits == 0) bits = free_[++word];
        free_[word] ^= bits & (~bits + 1);
        return static_cast<int64_t>(word) * 64 + __builtin_ctzll(bits);
    }

    // Skips the leading words without a free slot, so that `take` does not read them again.
    void skip_taken() {
        while (free_[static_cast<size_t>(taken_below_) / 64] == 0) taken_below_ += 64;
    }

  private:
    std::vector<uint64_t> free_;
    int64_t taken_below_ = 0;
};

inline int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline Wide divided_down(Wide value, Wide by) { return value / by - (value % by < 0 ? 1 : 0); }

struct Candidate {
    int64_t release, deadline, residue;  // release and deadline count from the boundary: release <= 0 < deadline
    int64_t dataset;
    bool is_taken;  // whether its next sample was given before this block
};

// Orders a heap with the worst candidate on top: the latest deadline, and last of all those that have to be kept.
struct IsBetter {
    bool operator()(const Candidate* one, const Candidate* other) const {
        if (one->is_taken != other->is_taken) return one->is_taken;
        if (one->deadline != other->deadline) return one->deadline < other->deadline;
        return one->dataset < other->dataset;
    }
};

Series series_of(int64_t dataset, int64_t share, int64_t one, int64_t begin, int64_t given, int64_t after) {
    const Wide start = static_cast<Wide>(given) * one - static_cast<Wide>(begin) * share;
    const int64_t at = static_cast<int64_t>(divided_down(start, share));
    const int64_t rest = static_cast<int64_t>(start - static_cast<Wide>(at) * share);
    return {at, rest, one / share, one % share, share, after - given, static_cast<int32_t>(dataset)};
}

// Appends the samples with deadlines in (from, to] to `drawn`, and counts them by deadline in `first`. Deadlines after
// the block's end count as the end. Returns false if a sample does not fit into the block.
bool draw(Series& series, int64_t from, int64_t to, int64_t size, std::vector<Job>& drawn, size_t& count,
          std::vector<int32_t>& first) {
    int64_t at = series.at, rest = series.rest, left = series.left;
    while (left > 0) {
        const int64_t whole = rest + series.step_rest;
        const bool carries = whole >= series.share;
        const int64_t next = at + series.step + carries, next_rest = carries ? whole - series.share : whole;
        const int64_t deadline = std::min<int64_t>(next + (next_rest > 0), size);
        if (deadline > to) break;
        if (at >= size || deadline <= from || count == drawn.size()) return false;
        drawn[count++] = {static_cast<int32_t>(std::max<int64_t>(at, 0)), static_cast<int32_t>(deadline), series.dataset};
        ++first[static_cast<size_t>(deadline - from)];
        at = next, rest = next_rest, --left;
    }
    series.at = at, series.rest = rest, series.left = left;
    return true;
}

}  // namespace

int32_t bloomery_fair_counts(int64_t n, const int64_t* shares, int64_t one, int64_t begin, int64_t size, int64_t blocks,
                             int64_t* counts) try {
    std::vector<int64_t> floors(static_cast<size_t>(n)), residues(static_cast<size_t>(n));
    std::vector<Candidate> candidates;
    for (int64_t i = 0; i < n; ++i) {
        const Wide due = static_cast<Wide>(shares[i]) * begin;
        floors[static_cast<size_t>(i)] = static_cast<int64_t>(due / one);
        residues[static_cast<size_t>(i)] = static_cast<int64_t>(due % one);
    }
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t end = begin + (block + 1) * size;
        int64_t places = end;
        candidates.clear();
        for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
            const Wide due = static_cast<Wide>(shares[i]) * size + residues[i];
            floors[i] += static_cast<int64_t>(due / one);
            residues[i] = static_cast<int64_t>(due % one);
            places -= floors[i];
            if (residues[i] > 0) {
                candidates.push_back({-divided_up(residues[i], shares[i]), divided_up(one - residues[i], shares[i]),
                                      residues[i], static_cast<int64_t>(i), counts[i] > floors[i]});
            }
            counts[i] = floors[i];
        }
        std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
            return a.release != b.release ? a.release > b.release : a.dataset < b.dataset;
        });
        std::priority_queue<const Candidate*, std::vector<const Candidate*>, IsBetter> kept;
        int64_t limit = 0, part = 0;  // the sum of the residues so far is limit - 1 + part / one; limit is that sum rounded up
        for (const Candidate& candidate : candidates) {
            kept.push(&candidate);
            part += candidate.residue;
            if (limit == 0) limit = 1;
            else if (part > one) ++limit, part -= one;
            if (candidate.release > -size && static_cast<int64_t>(kept.size()) > limit) kept.pop();
        }
        if (static_cast<int64_t>(kept.size()) < places || places < 0) return -1;
        while (static_cast<int64_t>(kept.size()) > places) kept.pop();
        for (; !kept.empty(); kept.pop()) counts[kept.top()->dataset] += 1;
    }
    return 0;
} catch (const std::exception&) {  // no memory
    return -4;
}

int32_t bloomery_fair_block(int64_t n, const int64_t* shares, int64_t one, int64_t begin, int64_t size,
                            const int64_t* counts, const int64_t* counts_after, int32_t* datasets, int64_t* turns) try {
    std::vector<Series> series;
    int64_t jobs = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (counts_after[i] < counts[i] || counts_after[i] - counts[i] > size) return -1;
        if (counts_after[i] == counts[i]) continue;
        jobs += counts_after[i] - counts[i];
        series.push_back(series_of(i, shares[i], one, begin, counts[i], counts_after[i]));
    }
    if (jobs != size) return -1;
    // Jobs are sorted by deadline in chunks that stay in the L1 cache and are wide enough for several jobs of a series.
    const int64_t wide = std::max<int64_t>(2048, 32 * static_cast<int64_t>(series.size()));
    const int64_t chunk = std::min<int64_t>(size, wide);
    // A series has at most one sample more than its share of a chunk, and up to three more at the block's end.
    const size_t most = static_cast<size_t>(chunk) + 3 * series.size();
    std::vector<Job> drawn(most), sorted(most);
    std::vector<int32_t> first(static_cast<size_t>(chunk) + 1);
    FreeSlots slots(size);
    for (int64_t from = 0; from < size; from += chunk) {
        const int64_t to = std::min(from + chunk, size);
        std::fill(first.begin(), first.end(), 0);
        size_t count = 0;
        for (Series& one_series : series) {
            if (!draw(one_series, from, to, size, drawn, count, first)) return -1;
        }
        std::partial_sum(first.begin(), first.end(), first.begin());
        for (size_t k = 0; k < count; ++k) {
            sorted[static_cast<size_t>(first[static_cast<size_t>(drawn[k].deadline - from - 1)]++)] = drawn[k];
        }
        for (size_t k = 0; k < count; ++k) {
            if (k % 16 == 0) slots.skip_taken();
            const int64_t slot = slots.take(sorted[k].release);
            if (slot >= sorted[k].deadline) return -1;
            datasets[slot] = sorted[k].dataset;
        }
    }
    std::vector<int64_t> next(counts, counts + n);
    for (int64_t slot = 0; slot < size; ++slot) turns[slot] = next[static_cast<size_t>(datasets[slot])]++;
    return 0;
} catch (const std::exception&) {  // no memory
    return -4;
}
