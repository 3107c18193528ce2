// Mixtures that are fair at every sample: bloomery/data/fair_quotas.py holds the same arithmetic in Python, and says
// why it is what it is. A dataset with share n of `one` is due n * t / one samples after t samples of the stream.
#include <algorithm>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "bloomery.h"

namespace {

using Wide = __int128;

// The dataset's next sample: released at slot `release` of the block, needed before slot `deadline`.
struct Job {
    int32_t release, deadline, dataset;
};

inline int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline Wide divided_down(Wide value, Wide by) { return value / by - (value % by < 0 ? 1 : 0); }

struct Candidate {
    int64_t release, deadline, residue;  // both counted from the boundary: release <= 0 < deadline
    int64_t dataset;
    bool is_taken;  // took its next sample before the block already
};

// The worst candidate on top: the latest deadline, and those that must stay last of all.
struct IsBetter {
    bool operator()(const Candidate* one, const Candidate* other) const {
        if (one->is_taken != other->is_taken) return one->is_taken;
        if (one->deadline != other->deadline) return one->deadline < other->deadline;
        return one->dataset < other->dataset;
    }
};

}  // namespace

int32_t bloomery_fair_counts(int64_t n, const int64_t* shares, int64_t one, int64_t begin, int64_t size, int64_t blocks,
                             int64_t* counts) {
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
        int64_t limit = 0, part = 0;  // the residues so far come to limit - 1 + part / one, rounded up to limit
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
}

int32_t bloomery_fair_block(int64_t n, const int64_t* shares, int64_t one, int64_t begin, int64_t size,
                            const int64_t* counts, const int64_t* counts_after, int32_t* datasets, int64_t* turns) {
    std::vector<Job> jobs, by_deadline(static_cast<size_t>(size));
    jobs.reserve(static_cast<size_t>(size));
    std::vector<int32_t> first(static_cast<size_t>(size) + 2, 0);
    for (int64_t i = 0; i < n; ++i) {
        if (counts_after[i] < counts[i] || counts_after[i] - counts[i] > size) return -1;
        if (counts_after[i] == counts[i]) continue;
        const int64_t share = shares[i], step = one / share, step_rest = one % share;
        const Wide start = static_cast<Wide>(counts[i]) * one - static_cast<Wide>(begin) * share;
        int64_t at = static_cast<int64_t>(divided_down(start, share));
        int64_t rest = static_cast<int64_t>(start - static_cast<Wide>(at) * share);
        for (int64_t turn = counts[i]; turn < counts_after[i]; ++turn) {
            const int64_t release = std::max<int64_t>(at, 0);
            at += step;
            rest += step_rest;
            if (rest >= share) rest -= share, ++at;
            const int64_t deadline = std::min<int64_t>(at + (rest > 0), size);
            if (release >= size || deadline < 1 || jobs.size() == static_cast<size_t>(size)) return -1;
            jobs.push_back({static_cast<int32_t>(release), static_cast<int32_t>(deadline), static_cast<int32_t>(i)});
            ++first[static_cast<size_t>(deadline) + 1];
        }
    }
    if (jobs.size() != static_cast<size_t>(size)) return -1;
    std::partial_sum(first.begin(), first.end(), first.begin());
    for (const Job& job : jobs) by_deadline[static_cast<size_t>(first[static_cast<size_t>(job.deadline)]++)] = job;
    std::vector<int32_t> next_free(static_cast<size_t>(size) + 1);
    std::iota(next_free.begin(), next_free.end(), 0);
    for (const Job& job : by_deadline) {
        int32_t slot = job.release;
        while (next_free[static_cast<size_t>(slot)] != slot) {
            int32_t& link = next_free[static_cast<size_t>(slot)];
            link = next_free[static_cast<size_t>(link)];
            slot = link;
        }
        if (slot >= job.deadline) return -1;
        next_free[static_cast<size_t>(slot)] = slot + 1;
        datasets[slot] = job.dataset;
    }
    std::vector<int64_t> next(counts, counts + n);
    for (int64_t slot = 0; slot < size; ++slot) turns[slot] = next[static_cast<size_t>(datasets[slot])]++;
    return 0;
}
