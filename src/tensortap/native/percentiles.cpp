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
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <tuple>

#ifdef __linux__
#include <sys/mman.h>
#endif
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
constexpr float kInf32 = std::numeric_limits<float>::infinity();
constexpr int kPercents[] = {50, 90, 95, 99};

constexpr uint64_t kAll = 4096;                    // up to here, all values are kept
constexpr uint64_t kTallied = uint64_t(1) << 20;   // up to here, the histogram counts all values
constexpr uint64_t kSample = uint64_t(1) << 18;
constexpr uint64_t kLargestSample = uint64_t(1) << 23;
constexpr size_t kHits = size_t(1) << 25;          // values that may be kept: 256 MiB
constexpr size_t kFewHits = size_t(1) << 22;       // in a pass of its own
constexpr int kDigit = Sorter::kDigit;
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

int digit_shift(uint64_t lo, uint64_t hi) {
  int shift = 0;
  while (((hi - lo) >> shift) >> kDigit) ++shift;
  return shift;
}

}  // namespace

// ---- A thread's share ----------------------------------------------------------------------------

// Large blocks come from a pool, which keeps some of them: in a virtual machine, the first touch of
// a page costs more than what is computed about the values that go there.
namespace {

constexpr size_t kLarge = size_t(1) << 18;  // values
constexpr size_t kHugePage = size_t(1) << 21;
static_assert(kLarge * sizeof(double) == kHugePage, "a large block is one huge page");

class Pool {
 public:
  double* take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (count_) return free_[--count_];
    }
    void* memory = std::aligned_alloc(kHugePage, kHugePage);
    if (!memory) throw std::bad_alloc();
#ifdef __linux__
    madvise(memory, kHugePage, MADV_HUGEPAGE);
#endif
    return static_cast<double*>(memory);
  }
  void give(double* block) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (count_ < kKept) return void(free_[count_++] = block);
    }
    std::free(block);
  }

 private:
  static constexpr size_t kKept = 8;  // 16 MiB
  std::mutex mutex_;
  double* free_[kKept];
  size_t count_ = 0;
};

Pool& pool() {
  static Pool* const instance = new Pool;  // never destroyed: threads may outlive what is
  return *instance;
}

void give_back(void* block) { pool().give(static_cast<double*>(block)); }

}  // namespace

double* Hits::room(size_t size) {
  if (blocks_.empty() || blocks_.back().size - blocks_.back().used < size) {
    if (size >= kLarge / 4 && size <= kLarge) {
      blocks_.push_back({{pool().take(), give_back}, kLarge, 0});
    } else {
      auto* memory = static_cast<double*>(std::malloc(size * sizeof(double)));
      if (!memory) throw std::bad_alloc();
      blocks_.push_back({{memory, std::free}, size, 0});
    }
  }
  return blocks_.back().values.get() + blocks_.back().used;
}

void Hits::append(Hits& other) {
  for (Block& block : other.blocks_)
    if (block.used) blocks_.insert(blocks_.begin(), std::move(block));
  other.blocks_.clear();
}

size_t Hits::total() const {
  size_t sum = 0;
  for (const Block& block : blocks_) sum += block.used;
  return sum;
}

Sorter::Sorter(const Cells& cells) : last_(cells.collected ? cells.collected - 1 : 0) {
  for (size_t k = 0; k < cells.collected; ++k) {
    hi_[k] = cells.hi[k], start_[k] = key_of(cells.lo[k]);
    shift_[k] = digit_shift(start_[k], key_of(cells.hi[k]));
  }
}

Counter::Counter(const Cells& cells, bool table)
    : sorter_(cells), counts_(cells.collected << kDigit, 0) {
  if (table) table_.reset(new uint32_t[kBuckets / 2 + 1]());
  tally_.table = table_.get();
}

Tally* Counter::prepare(size_t n, size_t limit) {
  if (kept_ > limit) {
    full_ = true;
    hits_.clear();
    kept_ = 0;
  }
  // What is dropped still has to be written somewhere.
  if (full_) hits_.clear();
  tally_.hits = hits_.room(n + 4);
  tally_.used = 0;
  return &tally_;
}

void Counter::keep() {
  for (size_t i = 0; i < tally_.used; ++i) ++counts_[sorter_(tally_.hits[i])];
  hits_.add(tally_.used);
  kept_ += tally_.used;
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
