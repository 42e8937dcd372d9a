// Where to look for the percentiles: the sample, and the cells that are laid by it.

#include "percentiles.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace tensortap {
namespace {

using std::int64_t;
using std::size_t;
using std::uint32_t;
using std::uint64_t;

constexpr float kInf32 = std::numeric_limits<float>::infinity();

constexpr uint64_t kAll = 4096;  // up to here, all values are kept
constexpr uint64_t kSample = uint64_t(1) << 18;
constexpr uint64_t kLargestSample = uint64_t(1) << 23;
constexpr int kGroups = 32;

uint64_t scramble(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

float rounded_down(double x) {
  const float f = float(x);
  return double(f) > x ? std::nextafter(f, -kInf32) : f;
}

float rounded_up(double x) {
  const float f = float(x);
  return double(f) < x ? std::nextafter(f, kInf32) : f;
}

// The nearest floats at or beyond x with an even last bit.
float even_below(double x) {
  float f = rounded_down(x);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  bits &= ~1u;
  std::memcpy(&f, &bits, 4);
  return f;
}

float even_above(double x) {
  float f = rounded_up(x);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  bits += bits & 1;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint64_t sample_size(uint64_t total) {
  if (total <= kAll) return 0;
  if (total <= kTallied) return std::max<uint64_t>(kAll, total / 16);
  return std::min(kLargestSample, std::max(kSample, total >> 8));
}

// The sample on a logarithmic grid of 512 steps an octave, over the 256 octaves below its maximum.
class Grid {
 public:
  Grid(const std::vector<double>& sample, double most) : counts_(kSize + 1, 0) {
    const uint64_t top = key_of(most) >> kShift;
    base_ = top > kSize - 1 ? top - (kSize - 1) : 0;
    low_ = kSize - 1, high_ = 0;
    for (double x : sample) {
      if (x != x) continue;
      const uint64_t at = place(x);
      low_ = at < low_ ? at : low_;
      high_ = at > high_ ? at : high_;
      ++counts_[at + 1];
    }
    for (uint64_t k = low_ + 1; k <= high_ + 1; ++k) counts_[k] += counts_[k - 1];
    std::fill(counts_.begin() + int64_t(high_) + 2, counts_.end(), counts_[high_ + 1]);
  }
  uint64_t total() const { return counts_[kSize]; }
  // The same on the coarser grid of a histogram, which has an edge wherever this has one.
  void tally(std::vector<int64_t>& histogram) const {
    for (uint64_t k = low_; k <= high_; ++k) {
      const uint32_t count = counts_[k + 1] - counts_[k];
      if (!count) continue;
      const double most = std::numeric_limits<float>::max();
      const float narrow = float(std::min(edge(k), most));
      uint32_t bits;
      std::memcpy(&bits, &narrow, 4);
      histogram[bits >> 19] += count;
    }
  }
  double lower(double rank) const { return rank < 0 ? 0.0 : edge(holder(rank)); }
  double upper(double rank) const {
    return rank >= double(total()) ? kInf : edge(holder(rank) + 1);
  }
  // How many lie below the step that holds x, and in the steps that hold lo to hi.
  double before(double x) const { return double(counts_[place(x)]); }
  uint64_t between(double lo, double hi) const {
    const uint64_t end = hi == kInf ? kSize : hi == edge(place(hi)) && hi > lo ? place(hi) : place(hi) + 1;
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
  uint64_t base_, low_, high_;
  std::vector<uint32_t> counts_;  // before each place
};

// As integers, since compilers make branches of floats. NaN is above all others.
int64_t count_less(const double* values, size_t n, double limit) {
  const uint64_t top = key_of(limit);
  uint64_t count = 0;
  for (size_t i = 0; i < n; ++i) count += (key_of(values[i]) - top) >> 63;
  return int64_t(count);
}

// The share of the sample below each limit, by groups of runs that lie interleaved: their
// disagreement tells how much a sample of neighbours really knows.
void standard_errors(const std::vector<double>& sample, double most, const double* limits,
                     double* errors) {
  int64_t counts[kGroups * 5] = {};  // below each limit, and all
  const auto runs = int64_t(sample.size() / kRun);
  const int team = thread_count(0, size_t(runs) >> 12);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1) \
    reduction(+ : counts[:kGroups * 5])
#else
  (void)team;
#endif
  for (int64_t j = 0; j < runs; ++j) {
    const double* run = sample.data() + size_t(j) * kRun;
    int64_t* own = counts + 5 * (j % kGroups);
    for (int p = 0; p < 4; ++p) own[p] += count_less(run, kRun, limits[p]);
    own[4] += count_less(run, kRun, std::nextafter(most, kInf));
  }
  for (int p = 0; p < 4; ++p) {
    double shares[kGroups], mean = 0, squares = 0;
    int groups = 0;
    for (int g = 0; g < kGroups; ++g)
      if (const int64_t size = counts[5 * g + 4])
        mean += shares[groups++] = double(counts[5 * g + p]) / double(size);
    errors[p] = 1;
    if (groups < 2) continue;
    mean /= groups;
    for (int g = 0; g < groups; ++g) squares += (shares[g] - mean) * (shares[g] - mean);
    errors[p] = std::sqrt(squares / (double(groups) * (groups - 1)));
  }
}

}  // namespace

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
    double* run = sample_.data() + size_t(j) * kRun;
    kernels.distances(pair, at, size, run);
    for (size_t i = 0; i < size; ++i) seen_ += run[i] == run[i], most_ = run[i] > most_ ? run[i] : most_;
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
  uint64_t seen = 0;
  double most = 0;
  const int team = thread_count(threads, size_t(last > first ? last - first : 0) / 256);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1) \
    reduction(+ : seen) reduction(max : most)
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
    double* run = sample_.data() + size_t(j) * kRun;
    kernels.distances(pair, size_t(start - begin), size, run);
    for (size_t i = 0; i < size; ++i) seen += run[i] == run[i], most = run[i] > most ? run[i] : most;
  }
  seen_ += seen;
  most_ = std::max(most_, most);
}

void Percentiles::collect_all() {
  ranges_.assign(1, {0.0, kInf});
  points_.clear();
}

void Percentiles::plan() {
  if (seen_ < 256) {
    collect_all();
    return arrange();
  }
  const Grid grid(sample_, most_);
  if (total_ > kTallied) grid.tally(histogram_);
  const double m = double(seen_);
  double limits[4], errors[4];
  for (int p = 0; p < 4; ++p) limits[p] = grid.upper(kPercents[p] / 100.0 * (m - 1));
  standard_errors(sample_, most_, limits, errors);
  const auto share_of = [&](double lo, double hi) { return double(grid.between(lo, hi)) / m; };
  double heavy = 0;  // the share of all values from which a single one is set apart
  std::vector<double> room;  // what share may lie in each range, if there are none such
  for (double sigmas : {3.8, 3.2, 2.7}) {
    double margins[4], expected = 0;
    for (int p = 0; p < 4; ++p) {
      const double q = kPercents[p] / 100.0, even = std::sqrt(q * (1 - q) / m);
      margins[p] = sigmas * std::max(even, errors[p]) * m + 2;
      expected += 2 * margins[p] / m;
    }
    heavy = std::max(0.0005, expected / 8);
    ranges_.clear();
    room.clear();
    for (int p = 0; p < 4; ++p) {
      const double middle = kPercents[p] / 100.0 * m;
      const double from = std::floor(middle - margins[p]), to = std::ceil(middle + margins[p]);
      double lo = grid.lower(from), hi = grid.upper(to);
      // Far more than asked for: values that are equal, or nearly so.
      if (share_of(lo, hi) > 3 * margins[p] / m + heavy)
        std::tie(lo, hi) = refined(lo, hi, from - grid.before(lo), to - grid.before(lo));
      if (!ranges_.empty() && lo <= ranges_.back().second) {
        ranges_.back().second = std::max(hi, ranges_.back().second);
        room.back() += 3 * margins[p] / m;
      } else {
        ranges_.push_back({lo, hi});
        room.push_back(3 * margins[p] / m + heavy);
      }
    }
    if (expected * double(total_) < double(kHits) / 2) break;
  }
  const std::vector<std::pair<double, double>> all = ranges_;
  ranges_.clear();
  points_.clear();
  for (size_t k = 0; k < all.size(); ++k) {
    const auto range = all[k];
    const double share = share_of(range.first, range.second);
    if (range.first == range.second) points_.push_back({range.first, share});
    else if (share > room[k]) split(range.first, range.second, share, heavy);
    else ranges_.push_back(range);
  }
  arrange();
}

// The values of the sample at two ranks among those of a range.
std::pair<double, double> Percentiles::refined(double lo, double hi, double from, double to) const {
  // Most often it is one value that both have: then no sorting.
  std::vector<double> few;
  for (size_t i = 0; i < sample_.size() && few.size() < 33; i += 7)
    if (sample_[i] >= lo && sample_[i] <= hi) few.push_back(sample_[i]);
  if (!few.empty()) {
    std::nth_element(few.begin(), few.begin() + int64_t(few.size() / 2), few.end());
    const double usual = few[few.size() / 2];
    const auto less = [&](double limit) { return count_less(sample_.data(), sample_.size(), limit); };
    const int64_t before = less(lo), below = less(usual) - before;
    const int64_t upto = less(std::nextafter(usual, kInf)) - before;
    if (from >= double(below) && to < double(upto)) return {usual, usual};
  }
  std::vector<double> some(sample_.size());
  size_t count = 0;
  for (double x : sample_) {
    some[count] = x;
    count += x >= lo && x <= hi;
  }
  some.resize(count);
  const auto at = [&](double rank, double otherwise) {
    if (!(rank >= 0 && rank < double(some.size()))) return otherwise;
    const auto place = some.begin() + int64_t(rank);
    std::nth_element(some.begin(), place, some.end());
    return *place;
  };
  const double low = at(from, lo), high = at(to, hi);
  return {low, high};
}

// Single out the values of a range that many share.
void Percentiles::split(double lo, double hi, double share, double heavy) {
  constexpr size_t kEnough = 4096;
  std::vector<double> some;
  const auto step = size_t(std::max(1.0, share * double(sample_.size()) / kEnough));
  for (size_t i = 0; i < sample_.size(); i += step)
    if (sample_[i] >= lo && sample_[i] <= hi) some.push_back(sample_[i]);
  std::sort(some.begin(), some.end());
  double from = lo;
  size_t between = 0;
  for (size_t i = 0, j; i < some.size(); i = j) {
    for (j = i; j < some.size() && some[j] == some[i];) ++j;
    const double part = double(j - i) / double(some.size()) * share;
    if (j - i < 8 || part < heavy) {
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
  c.narrow = first_;
  // A difference is zero just where its rounded value is; of other points one must make sure.
  for (const auto& point : points_) c.checked |= point.first != 0;
  std::sort(ranges_.begin(), ranges_.end());
  for (const auto& range : ranges_) {
    double lo = range.first, hi = range.second;
    float lo32 = rounded_up(lo), hi32 = rounded_down(hi);
    if (first_ && !c.checked) {
      // Floats with an even last bit, to which what lies halfway to their neighbours is rounded: so
      // there are bounds that say the same of a distance before and after it is rounded.
      const bool all_but_zero = lo == std::numeric_limits<double>::denorm_min();
      lo32 = all_but_zero ? std::numeric_limits<float>::denorm_min() : even_below(lo);
      hi32 = even_above(hi);
      if (!all_but_zero)
        lo = lo32 > 0 ? (double(std::nextafter(lo32, -kInf32)) + double(lo32)) / 2 : 0.0;
      hi = hi32 < kInf32 ? (double(hi32) + double(std::nextafter(hi32, kInf32))) / 2 : kInf;
      if (c.count && lo <= c.hi[c.count - 1]) {  // which now touches the one before
        c.hi[c.count - 1] = hi, c.hi32[c.count - 1] = hi32;
        continue;
      }
    }
    c.lo[c.count] = lo, c.hi[c.count] = hi, c.lo32[c.count] = lo32, c.hi32[c.count] = hi32;
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
  hits_.clear();
  counts_.assign(c.collected << kDigit, 0);
  full_ = false;
}

}  // namespace tensortap
