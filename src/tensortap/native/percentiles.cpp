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
#include <cstring>
#include <limits>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace tensortap {
namespace {

using std::int64_t;
using std::size_t;
using std::uint32_t;
using std::uint64_t;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int kPercents[] = {50, 90, 95, 99};

constexpr uint64_t kAll = 4096;                    // up to here, all values are kept
constexpr uint64_t kTallied = uint64_t(1) << 20;   // up to here, the histogram counts all values
constexpr uint64_t kSample = uint64_t(1) << 18;
constexpr uint64_t kLargestSample = uint64_t(1) << 23;
constexpr size_t kHits = size_t(1) << 25;          // values that may be kept: 256 MiB
constexpr size_t kFewHits = size_t(1) << 22;       // in a pass of its own
constexpr int kDigit = 12;
constexpr int kGroups = 32;

uint64_t key_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  return bits;
}

double from_key(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

uint64_t scramble(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

float rounded_down(double x) {
  const float f = float(x);
  return double(f) > x ? std::nextafter(f, -std::numeric_limits<float>::infinity()) : f;
}

float rounded_up(double x) {
  const float f = float(x);
  return double(f) < x ? std::nextafter(f, std::numeric_limits<float>::infinity()) : f;
}

uint64_t sample_size(uint64_t total) {
  if (total <= kAll) return 0;
  if (total <= kTallied) return std::max<uint64_t>(kAll, total / 16);
  return std::min(kLargestSample, std::max(kSample, total >> 10));
}

// The sample on a logarithmic grid of 512 steps an octave, over the 256 octaves below its maximum.
class Grid {
 public:
  Grid(const std::vector<double>& sample, double most) : counts_(kSize + 1, 0) {
    const uint64_t top = key_of(most) >> kShift;
    base_ = top > kSize - 1 ? top - (kSize - 1) : 0;
    for (double x : sample)
      if (x == x) ++counts_[place(x) + 1];
    for (size_t k = 1; k <= kSize; ++k) counts_[k] += counts_[k - 1];
  }
  uint64_t total() const { return counts_[kSize]; }
  double lower(double rank) const { return rank < 0 ? 0.0 : edge(holder(rank)); }
  double upper(double rank) const {
    return rank >= double(total()) ? kInf : edge(holder(rank) + 1);
  }
  // How many lie between two edges.
  uint64_t between(double lo, double hi) const {
    const uint64_t end = hi == kInf ? kSize : place(hi);
    return counts_[end] - counts_[place(lo)];
  }

 private:
  static constexpr int kShift = 43;
  static constexpr uint64_t kSize = uint64_t(1) << 17;

  uint64_t place(double x) const {
    const uint64_t key = key_of(x) >> kShift;
    return key <= base_ ? 0 : std::min(key - base_, kSize - 1);
  }
  uint64_t holder(double rank) const {
    const auto at = std::upper_bound(counts_.begin(), counts_.end(), uint32_t(rank));
    return uint64_t(at - counts_.begin()) - 1;
  }
  double edge(uint64_t at) const {
    if (at == 0) return 0.0;
    const uint64_t key = at + base_;
    return key >= (uint64_t(0x7ff) << 9) ? kInf : from_key(key << kShift);
  }
  uint64_t base_;
  std::vector<uint32_t> counts_;  // before each place
};

// The share of the sample below each limit, by groups of runs that lie interleaved: their
// disagreement tells how much a sample of neighbours really knows.
void standard_errors(const std::vector<double>& sample, const double* limits, double* errors) {
  int64_t below[kGroups][4] = {}, sizes[kGroups] = {};
  for (size_t j = 0; j * kRun < sample.size(); ++j) {
    const double* run = sample.data() + j * kRun;
    const size_t g = j % kGroups;
    int64_t size = 0, count[4] = {};
    for (size_t i = 0; i < kRun; ++i) {
      size += run[i] == run[i];
      for (int p = 0; p < 4; ++p) count[p] += run[i] < limits[p];
    }
    sizes[g] += size;
    for (int p = 0; p < 4; ++p) below[g][p] += count[p];
  }
  for (int p = 0; p < 4; ++p) {
    double shares[kGroups], mean = 0, squares = 0;
    int groups = 0;
    for (int g = 0; g < kGroups; ++g)
      if (sizes[g]) mean += shares[groups++] = double(below[g][p]) / double(sizes[g]);
    errors[p] = 1;
    if (groups < 2) continue;
    mean /= groups;
    for (int g = 0; g < groups; ++g) squares += (shares[g] - mean) * (shares[g] - mean);
    errors[p] = std::sqrt(squares / (double(groups) * (groups - 1)));
  }
}

// The values at ascending ranks; few or many, narrowly spread or all alike.
std::vector<double> select(std::vector<double>& values, const std::vector<int64_t>& ranks) {
  constexpr size_t kFew = 4096, kPlaces = 8192;
  std::vector<double> result;
  const auto pick = [&](std::vector<double>& some, int64_t rank) {
    std::nth_element(some.begin(), some.begin() + rank, some.end());
    return some[size_t(rank)];
  };
  double lo = kInf, hi = 0;
  if (values.size() > kFew)
    for (double x : values) lo = x < lo ? x : lo, hi = x > hi ? x : hi;
  const double scale = double(kPlaces - 1) / (hi - lo);
  if (values.size() <= kFew || !(hi > lo) || !(scale < kInf) || hi == kInf) {
    for (int64_t rank : ranks) result.push_back(pick(values, rank));
    return result;
  }
  std::vector<uint32_t> counts(kPlaces, 0);
  const auto place = [&](double x) { return size_t((x - lo) * scale); };
  for (double x : values) ++counts[place(x)];
  for (int64_t rank : ranks) {
    size_t at = 0;
    int64_t below = 0;
    while (below + counts[at] <= rank) below += counts[at++];
    std::vector<double> some;
    some.reserve(counts[at]);
    for (double x : values)
      if (place(x) == at) some.push_back(x);
    result.push_back(pick(some, rank - below));
  }
  return result;
}

}  // namespace

// ---- A thread's share ----------------------------------------------------------------------------

Counter::Counter(const Cells& cells, size_t n, bool table) {
  const size_t room = std::min(n, kChunk);
  room_.reset(new double[room * cells.collected + 1]);
  for (size_t k = 0; k < cells.collected; ++k) tally_.hits[k] = room_.get() + k * room;
  if (table) table_.reset(new uint32_t[kBuckets / 2 + 1]());
  tally_.table = table_.get();
}

void Counter::flush(size_t limit) {
  for (size_t k = 0; k < kMaxCollected; ++k) {
    const size_t used = tally_.used[k];
    if (!used) continue;
    tally_.used[k] = 0;
    if (kept_ + used > limit) full_ = true;
    if (full_) continue;
    hits_[k].insert(hits_[k].end(), tally_.hits[k], tally_.hits[k] + used);
    kept_ += used;
  }
}

std::unique_ptr<Counter> Percentiles::counter(size_t n) const {
  return std::unique_ptr<Counter>(new Counter(cells_, n, first_ && total_ <= kTallied));
}

size_t Percentiles::hit_limit(int threads) const {
  size_t kept = 0;
  for (const auto& hits : hits_) kept += hits.size();
  return kept >= kHits ? 0 : (kHits - kept) / size_t(threads);
}

void Percentiles::absorb(Counter& counter) {
  for (size_t k = 0; k < cells_.count; ++k) {
    at_least_[k] += counter.tally_.at_least[k];
    above_[k] += counter.tally_.above[k];
    inside_[k] += counter.tally_.inside[k];
  }
  full_ |= counter.full_;
  for (size_t k = 0; k < cells_.collected; ++k) {
    if (full_) std::vector<double>().swap(hits_[k]);
    else if (hits_[k].empty()) hits_[k].swap(counter.hits_[k]);
    else hits_[k].insert(hits_[k].end(), counter.hits_[k].begin(), counter.hits_[k].end());
  }
  if (counter.table_)
    for (size_t k = 0; k < kBuckets / 2; ++k) histogram_[k] += counter.table_[k];
}

// ---- Where to look -------------------------------------------------------------------------------

Percentiles::Percentiles(uint64_t total) : total_(total), histogram_(kBuckets, 0) {
  runs_ = size_t(sample_size(total) / kRun);
  if (!runs_) return;
  spacing_ = total / runs_;
  sample_.assign(runs_ * kRun, std::numeric_limits<double>::quiet_NaN());
}

uint64_t Percentiles::start_of(uint64_t run) const {
  return run * spacing_ + scramble(run) % (spacing_ - (kRun - 1));
}

std::vector<int64_t> Percentiles::places(uint64_t n) const {
  std::vector<int64_t> found;
  for (uint64_t j = runs_ ? position_ / spacing_ : 0; j < runs_; ++j) {
    const uint64_t start = start_of(j);
    if (start >= position_ + n) break;
    if (start >= position_) found.push_back(int64_t(start - position_));
  }
  return found;
}

void Percentiles::sample_runs(const PairKernels& kernels, const Pair& pair, uint64_t n) {
  size_t at = 0;
  for (uint64_t j = runs_ ? position_ / spacing_ : 0; j < runs_; ++j) {
    const uint64_t start = start_of(j);
    if (start >= position_ + n) break;
    if (start < position_) continue;
    const size_t size = size_t(std::min<uint64_t>(kRun, position_ + n - start));
    kernels.distances(pair, at, size, sample_.data() + size_t(j) * kRun);
    at += kRun;
  }
  position_ += n;
}

void Percentiles::sample(const PairKernels& kernels, const Pair& pair, size_t n, int threads) {
  const uint64_t begin = position_, end = begin + n;
  position_ = end;
  if (!runs_ || !n) return;
  const auto first = int64_t(begin / spacing_);
  const auto last = int64_t(std::min<uint64_t>(runs_, (end - 1) / spacing_ + 1));
  const size_t r_size = element_size(pair.r_dtype), c_size = element_size(pair.c_dtype);
  const int team = thread_count(threads, size_t(last > first ? last - first : 0) / 256);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
#else
  (void)team;
#endif
  for (int64_t j = first; j < last; ++j) {
    const uint64_t start = start_of(uint64_t(j)), ahead = start_of(uint64_t(j) + 12);
    if (ahead < end) {
      __builtin_prefetch(pair.r + (ahead - begin) * r_size);
      __builtin_prefetch(pair.c + (ahead - begin) * c_size);
    }
    if (start < begin || start >= end) continue;
    const size_t size = size_t(std::min<uint64_t>(kRun, end - start));
    kernels.distances(pair, size_t(start - begin), size, sample_.data() + size_t(j) * kRun);
  }
}

void Percentiles::collect_all() {
  ranges_.assign(1, {0.0, kInf});
  points_.clear();
}

void Percentiles::plan() {
  double most = 0;
  uint64_t seen = 0;
  for (double x : sample_) seen += x == x, most = x > most ? x : most;
  if (seen < 256) {
    collect_all();
    return arrange();
  }
  if (total_ > kTallied)
    for (double x : sample_) {
      if (x != x) continue;
      const float narrow = x > std::numeric_limits<float>::max() ? std::numeric_limits<float>::max() : float(x);
      uint32_t bits;
      std::memcpy(&bits, &narrow, 4);
      ++histogram_[bits >> 19];
    }
  const Grid grid(sample_, most);
  const double m = double(seen);
  double limits[4], errors[4];
  for (int p = 0; p < 4; ++p) limits[p] = grid.upper(kPercents[p] / 100.0 * (m - 1));
  standard_errors(sample_, limits, errors);
  for (double sigmas : {4.2, 3.4, 2.8}) {
    ranges_.clear();
    uint64_t inside = 0;
    double expected = 0;
    for (int p = 0; p < 4; ++p) {
      const double q = kPercents[p] / 100.0, even = std::sqrt(q * (1 - q) / m);
      const double margin = sigmas * std::max(even, errors[p]) * m + 2;
      const double lo = grid.lower(std::floor(q * m - margin)), hi = grid.upper(std::ceil(q * m + margin));
      expected += 2 * margin;
      if (!ranges_.empty() && lo <= ranges_.back().second) ranges_.back().second = hi;
      else ranges_.push_back({lo, hi});
    }
    for (const auto& range : ranges_) inside += grid.between(range.first, range.second);
    if (double(inside) > 2 * expected) break;  // equal values, which more care does not thin out
    if (double(inside) / m * double(total_) < double(kHits)) break;
  }
  const std::vector<std::pair<double, double>> wide = ranges_;
  ranges_.clear();
  points_.clear();
  for (const auto& range : wide) {
    const double share = double(grid.between(range.first, range.second)) / m;
    if (share > 0.02) split(range.first, range.second, share);
    else ranges_.push_back(range);
  }
  arrange();
}

// Single out the values of a range that many share.
void Percentiles::split(double lo, double hi, double share) {
  constexpr size_t kEnough = 8192;
  constexpr double kHeavy = 0.003;
  std::vector<double> some;
  const double step = std::max(1.0, share * double(sample_.size()) / kEnough);
  double next = 0, seen = 0;
  for (double x : sample_)
    if (x >= lo && x <= hi && seen++ >= next) some.push_back(x), next += step;
  std::sort(some.begin(), some.end());
  double from = lo;
  size_t between = 0;
  for (size_t i = 0, j; i < some.size(); i = j) {
    for (j = i; j < some.size() && some[j] == some[i];) ++j;
    const double part = double(j - i) / double(some.size()) * share;
    if (j - i < 8 || part < kHeavy) {
      between += j - i;
      continue;
    }
    if (between && some[i] > from) ranges_.push_back({from, std::nextafter(some[i], -kInf)});
    points_.push_back({some[i], part});
    from = std::nextafter(some[i], kInf);
    between = 0;
  }
  if (between && from <= hi) ranges_.push_back({from, hi});
}

void Percentiles::arrange() {
  // Too many for the tables: what is left out is found in another pass, should it be needed.
  if (ranges_.size() > kMaxCollected) ranges_.resize(kMaxCollected);
  const size_t room = kMaxCells - ranges_.size();
  if (points_.size() > room) {
    std::sort(points_.begin(), points_.end(),
              [](const auto& a, const auto& b) { return a.second > b.second; });
    points_.resize(room);
  }
  Cells& c = cells_;
  c = Cells{};
  c.narrow = true;
  for (const auto& range : ranges_) {
    c.lo[c.count] = range.first, c.hi[c.count] = range.second;
    // With points, values are only compared as floats where that is exact.
    c.lo32[c.count] = points_.empty() ? rounded_down(range.first) : rounded_up(range.first);
    c.hi32[c.count] = points_.empty() ? rounded_up(range.second) : rounded_down(range.second);
    ++c.count;
  }
  c.collected = c.count;
  for (const auto& point : points_) {
    c.lo[c.count] = c.hi[c.count] = point.first;
    c.lo32[c.count] = c.hi32[c.count] = float(point.first);
    c.narrow &= double(float(point.first)) == point.first;
    ++c.count;
  }
  std::fill(at_least_, at_least_ + kMaxCells, 0);
  std::fill(above_, above_ + kMaxCells, 0);
  std::fill(inside_, inside_ + kMaxCells, 0);
  for (auto& hits : hits_) hits.clear();
  full_ = false;
}

// ---- What was found ------------------------------------------------------------------------------

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
  std::vector<Open> asked;
  asked.swap(open_);
  std::vector<std::pair<size_t, int64_t>> wanted;  // cell, rank
  for (const Open& open : asked) locate(open, order, wanted);
  std::vector<std::vector<int64_t>> ranks(cells_.collected);
  std::vector<std::vector<double>> values(cells_.collected);
  for (const auto& want : wanted)
    ranks[want.first].push_back(want.second - (finite_ - at_least_[want.first]));
  const auto cells = int64_t(cells_.collected);
  size_t kept = 0;
  for (const auto& hits : hits_) kept += hits.size();
  const int team = thread_count(0, kept >> 14);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
#else
  (void)team;
#endif
  for (int64_t k = 0; k < cells; ++k)
    if (!ranks[size_t(k)].empty()) values[size_t(k)] = select(hits_[k], ranks[size_t(k)]);
  for (size_t k = 0; k < cells_.collected; ++k)
    for (size_t i = 0; i < ranks[k].size(); ++i)
      found_.push_back({ranks[k][i] + (finite_ - at_least_[k]), values[k][i]});
}

void Percentiles::locate(const Open& open, const std::vector<size_t>& order,
                         std::vector<std::pair<size_t, int64_t>>& wanted) {
  uint64_t lo = 0;
  int64_t passed = 0;
  for (size_t k : order) {
    const int64_t below = finite_ - at_least_[k];
    if (open.rank < below) {
      open_.push_back({open.rank, lo, key_of(cells_.lo[k]) - 1, passed, below - passed});
      return;
    }
    const bool collected = k < cells_.collected;
    const int64_t inside = collected ? inside_[k] : at_least_[k] - above_[k];
    if (open.rank < below + inside) {
      if (!collected) found_.push_back({open.rank, cells_.lo[k]});
      else if (!full_) wanted.push_back({k, open.rank});
      else open_.push_back({open.rank, key_of(cells_.lo[k]), key_of(cells_.hi[k]), below, inside});
      return;
    }
    lo = key_of(cells_.hi[k]) + 1;
    passed = below + inside;
  }
  open_.push_back({open.rank, lo, key_of(kInf), passed, finite_ - passed});
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

int digit_shift(uint64_t lo, uint64_t hi) {
  int shift = 0;
  while (((hi - lo) >> shift) >> kDigit) ++shift;
  return shift;
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
    std::unique_ptr<Counter> own = counter(n);
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
          kernels.count(room.get(), size, cells_, own->get());
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
      own->flush(limit);
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
