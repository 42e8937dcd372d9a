// Exact percentiles of |d| over a stream of pairs (see percentiles.cpp).
#pragma once

#include "difference.hpp"
#include "hits.hpp"

#include <memory>
#include <utility>
#include <vector>

namespace tensortap {

constexpr std::size_t kRun = 16;                       // neighbours that are sampled together
constexpr std::uint64_t kTallied = std::uint64_t(1) << 20;  // up to here, the histogram counts all
constexpr std::size_t kHits = std::size_t(1) << 25;    // values that may be kept: 256 MiB
constexpr int kPercents[] = {50, 90, 95, 99};

// First `sample` over the whole stream, then `plan`; then the pass that counts and collects, by
// `difference` or by `scan`; then `settle`. As long as that returns false, another pass by `scan`.
class Percentiles {
 public:
  explicit Percentiles(std::uint64_t total);
  Percentiles(const Percentiles&) = delete;
  Percentiles& operator=(const Percentiles&) = delete;

  // The next n pairs of the stream.
  void sample(const PairKernels& kernels, const Pair& pair, std::size_t n, int threads);
  // The same for pairs that do not lie in order: where among the next n each run of kRun starts, and
  // then those runs themselves, one behind the other.
  std::vector<std::int64_t> places(std::uint64_t n) const;
  void sample_runs(const PairKernels& kernels, const Pair& pair, std::uint64_t n);
  void plan();
  void scan(const PairKernels& kernels, const Pair& pair, std::size_t n, int threads);
  bool settle(std::int64_t finite);
  // By ascending rank: floor(p * (finite - 1)) and the next, for each p, without repetition.
  std::vector<double> values() const;
  // Up to kTallied pairs all are counted; beyond, the sample is.
  const std::vector<std::int64_t>& histogram() const { return histogram_; }

  const Cells& cells() const { return cells_; }
  std::unique_ptr<Counter> counter() const;
  void absorb(Counter& counter);
  std::size_t hit_limit(int threads) const;

 private:
  // A rank whose value lies between two keys (bits of a double), with what is below and inside.
  struct Open {
    std::int64_t rank;
    std::uint64_t lo, hi;
    std::int64_t below, inside;
  };
  struct Found {
    std::int64_t rank;
    double value;
  };

  std::uint64_t start_of(std::uint64_t run) const;
  void collect_all();
  std::pair<double, double> refined(double lo, double hi, double from, double to) const;
  void split(double lo, double hi, double share, double heavy);
  void arrange();
  void locate_all();
  void select(const std::vector<std::pair<std::size_t, std::int64_t>>& wanted);
  void narrow();
  bool next_pass();

  std::uint64_t total_, position_ = 0, spacing_ = 0;
  std::size_t runs_ = 0;
  std::uint64_t seen_ = 0;  // finite ones of the sample
  double most_ = 0;
  std::vector<double> sample_;
  std::vector<std::pair<double, double>> ranges_, points_;
  std::vector<std::int64_t> histogram_;
  Cells cells_{};
  std::int64_t at_least_[kMaxCells] = {}, above_[kMaxCells] = {};
  Hits hits_;
  std::vector<std::int64_t> counts_;  // of the hits by place
  bool full_ = false, first_ = true, digits_ = false;
  std::int64_t finite_ = 0;
  std::vector<Open> open_;
  std::vector<Found> found_;
  // While digits are counted: the ranges between keys, and a table for each.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> spans_;
  std::vector<std::int64_t> tables_;
};

}  // namespace tensortap
