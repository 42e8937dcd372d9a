// Exact percentiles in one pass, nearly always.
//
// A sample says roughly where they are: around each, a cell is laid that its sampling error cannot
// leave but once in many thousand times. The pass counts the values below each cell and takes out
// those inside; of these the right one is selected. Where many values are equal (zeros, steps of a
// coarse format) the value itself becomes a cell, of which it is enough to count the members. Should
// a percentile lie outside of its cell, or a cell hold more than may be kept, further passes narrow
// it down by the bits of the values, as far as need be.

#include "percentiles.hpp"

#include <algorithm>
#include <cmath>

namespace tensortap {

using std::int64_t;
using std::size_t;
using std::uint32_t;
using std::uint64_t;

namespace {
constexpr size_t kFewHits = size_t(1) << 22;  // that a pass of its own may collect
}

std::unique_ptr<Counter> Percentiles::counter() const {
  return std::unique_ptr<Counter>(new Counter(cells_, first_ && total_ <= kTallied));
}

size_t Percentiles::hit_limit(int threads) const {
  const size_t kept = hits_.total();
  return kept >= kHits ? 0 : (kHits - kept) / size_t(threads);
}

void Percentiles::absorb(Counter& counter) {
  for (size_t k = 0; k < cells_.count; ++k) {
    at_least_[k] += counter.tally_.at_least[k];
    above_[k] += counter.tally_.above[k];
  }
  for (size_t k = 0; k < counts_.size(); ++k) counts_[k] += counter.counts_[k];
  full_ |= counter.full_;
  if (full_) hits_.clear();
  else hits_.append(counter.hits_);
  if (counter.table_)
    for (size_t k = 0; k < kBuckets / 2; ++k) histogram_[k] += counter.table_[k];
}

bool Percentiles::settle(int64_t finite) {
  if (first_) {
    first_ = false;
    finite_ = finite;
    for (int percent : kPercents) {
      if (!finite) break;
      const auto below = int64_t(std::floor(percent / 100.0 * double(finite - 1)));
      for (int64_t rank : {below, std::min(below + 1, finite - 1)})
        if (open_.empty() || open_.back().rank < rank) open_.push_back({rank, 0, 0, 0, 0});
    }
    std::vector<double>().swap(sample_);
    locate_all();
  } else if (digits_) {
    narrow();
  } else {
    locate_all();
  }
  return !next_pass();
}

void Percentiles::locate_all() {
  std::vector<size_t> order(cells_.count);
  for (size_t k = 0; k < order.size(); ++k) order[k] = k;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return cells_.lo[a] < cells_.lo[b]; });
  int64_t inside[kMaxCells] = {};
  for (size_t k = 0; k < cells_.count; ++k) {
    if (k >= cells_.collected) inside[k] = at_least_[k] - above_[k];
    else for (size_t i = 0; i < size_t(1) << kDigit; ++i) inside[k] += counts_[(k << kDigit) + i];
  }
  std::vector<Open> asked;
  asked.swap(open_);
  std::vector<std::pair<size_t, int64_t>> wanted;  // cell, rank in it
  for (const Open& open : asked) {
    uint64_t lo = 0;
    int64_t passed = 0;
    bool done = false;
    for (size_t at = 0; at < order.size() && !done; ++at) {
      const size_t k = order[at];
      const bool collected = k < cells_.collected;
      const int64_t below = finite_ - at_least_[k];
      done = true;
      if (open.rank < below) {
        open_.push_back({open.rank, lo, key_of(cells_.lo[k]) - 1, passed, below - passed});
      } else if (open.rank >= below + inside[k]) {
        done = false;
      } else if (!collected) {
        found_.push_back({open.rank, cells_.lo[k]});
      } else if (full_) {
        const uint64_t ends[] = {key_of(cells_.lo[k]), key_of(cells_.hi[k])};
        open_.push_back({open.rank, ends[0], ends[1], below, inside[k]});
      } else {
        wanted.push_back({k, open.rank - below});
      }
      lo = key_of(cells_.hi[k]) + 1;
      passed = below + inside[k];
    }
    if (!done) open_.push_back({open.rank, lo, key_of(kInf), passed, finite_ - passed});
  }
  select(wanted);
}

void Percentiles::select(const std::vector<std::pair<size_t, int64_t>>& wanted) {
  std::vector<std::vector<double>> places;
  std::vector<unsigned char> marked(counts_.size(), 0);
  std::vector<std::pair<size_t, int64_t>> answers;  // index into places, rank within
  for (const auto& want : wanted) {
    size_t at = want.first << kDigit;
    int64_t rank = want.second;
    while (counts_[at] <= rank) rank -= counts_[at++];
    if (!marked[at]) {
      places.emplace_back();
      places.back().reserve(size_t(counts_[at]));
      marked[at] = static_cast<unsigned char>(places.size());
    }
    answers.push_back({size_t(marked[at]) - 1, rank});
  }
  const Sorter sorter(cells_);
  const auto& blocks = hits_.blocks();
  const int team = thread_count(0, std::min(blocks.size(), hits_.total() >> 14));
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
#else
  (void)team;
#endif
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (wanted.empty()) continue;
    const double* values = blocks[b].values.get();
    std::vector<std::vector<double>> own(places.size());
    for (size_t i = 0; i < blocks[b].used; ++i)
      if (const unsigned char mark = marked[sorter(values[i])])
        own[size_t(mark) - 1].push_back(values[i]);
#ifdef _OPENMP
#pragma omp critical(tensortap_percentiles)
#endif
    for (size_t k = 0; k < own.size(); ++k)
      places[k].insert(places[k].end(), own[k].begin(), own[k].end());
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    std::vector<double>& values = places[answers[i].first];
    const auto at = values.begin() + answers[i].second;
    const auto ends = std::minmax_element(values.begin(), values.end());
    if (*ends.first < *ends.second) std::nth_element(values.begin(), at, values.end());
    found_.push_back({wanted[i].second + (finite_ - at_least_[wanted[i].first]), *at});
  }
}

// True when another pass over the stream is needed, for which everything is then prepared.
bool Percentiles::next_pass() {
  std::vector<Open> left;
  for (const Open& open : open_) {
    if (open.lo == open.hi) found_.push_back({open.rank, from_key(open.lo)});
    else left.push_back(open);
  }
  open_.swap(left);
  position_ = 0;
  spans_.clear();
  int64_t inside = 0;
  for (const Open& open : open_)
    if (spans_.empty() || spans_.back().first != open.lo) {
      spans_.push_back({open.lo, open.hi});
      inside += open.inside;
    }
  digits_ = inside > int64_t(kFewHits);
  ranges_.clear();
  points_.clear();
  if (digits_) tables_.assign(spans_.size() << kDigit, 0);
  else
    for (const auto& span : spans_) ranges_.push_back({from_key(span.first), from_key(span.second)});
  arrange();
  return !open_.empty();
}

void Percentiles::narrow() {
  for (Open& open : open_) {
    size_t at = 0;
    while (spans_[at].first != open.lo) ++at;
    const int shift = digit_shift(open.lo, open.hi);
    const int64_t* table = tables_.data() + (at << kDigit);
    uint64_t digit = 0;
    while (open.below + table[digit] <= open.rank) open.below += table[digit++];
    open.inside = table[digit];
    open.lo += digit << shift;
    open.hi = std::min(open.hi, open.lo + (uint64_t(1) << shift) - 1);
  }
}

std::vector<double> Percentiles::values() const {
  std::vector<Found> sorted = found_;
  std::sort(sorted.begin(), sorted.end(),
            [](const Found& a, const Found& b) { return a.rank < b.rank; });
  std::vector<double> result;
  for (const Found& found : sorted) result.push_back(found.value);
  return result;
}

// ---- Further passes ------------------------------------------------------------------------------

void Percentiles::scan(const PairKernels& kernels, const Pair& pair, size_t n, int threads) {
  const auto chunks = int64_t((n + kChunk - 1) / kChunk);
  const int team = thread_count(threads, n >> 16);
  const size_t limit = hit_limit(team);
#ifdef _OPENMP
#pragma omp parallel num_threads(team) if (team > 1)
#endif
  {
    std::unique_ptr<Counter> own = counter();
    std::vector<int64_t> tables(tables_.size(), 0);
    std::unique_ptr<double[]> room(new double[kPairBlock + kPadding]);
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 4)
#endif
    for (int64_t c = 0; c < chunks; ++c) {
      const size_t first = size_t(c) * kChunk, last = std::min(n, first + kChunk);
      for (size_t at = first; at < last; at += kPairBlock) {
        const size_t size = std::min(last - at, kPairBlock);
        kernels.distances(pair, at, size, room.get());
        if (!digits_) {
          kernels.count(room.get(), size, cells_, own->prepare(size, limit));
          own->keep();
          continue;
        }
        for (size_t s = 0; s < spans_.size(); ++s) {
          const uint64_t lo = spans_[s].first, span = spans_[s].second - lo;
          const int shift = digit_shift(lo, spans_[s].second);
          int64_t* table = tables.data() + (s << kDigit);
          for (size_t i = 0; i < size; ++i) {  // NaN is above all keys
            const uint64_t key = (key_of(room[i]) & ~(uint64_t(1) << 63)) - lo;
            if (key <= span) ++table[key >> shift];
          }
        }
      }
    }
#ifdef _OPENMP
#pragma omp critical(tensortap_percentiles)
#endif
    {
      absorb(*own);
      for (size_t k = 0; k < tables.size(); ++k) tables_[k] += tables[k];
    }
  }
}

}  // namespace tensortap
