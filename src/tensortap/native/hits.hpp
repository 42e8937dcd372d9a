// What threads find in a pass, and where they keep it (see percentiles.cpp).
#pragma once

#include "difference.hpp"
#include "keys.hpp"

#include <memory>
#include <vector>

namespace tensortap {

// Values that were taken out, in blocks.
class Hits {
 public:
  // Room for `size` more, in one piece.
  double* room(std::size_t size);
  void add(std::size_t used) { blocks_.back().used += used; }
  void append(Hits& other);
  void clear() { blocks_.clear(); }
  std::size_t total() const;

  struct Block {
    std::unique_ptr<double, void (*)(void*)> values;
    std::size_t size, used;
  };
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  std::vector<Block> blocks_;
};

// Where a hit belongs: its cell, and by the leading bits of its distance from the cell's beginning,
// one of many places in it.
class Sorter {
 public:
  explicit Sorter(const Cells& cells);
  std::size_t operator()(double x) const {
    std::size_t cell = 0;
    for (std::size_t k = 0; k < last_; ++k) cell += x > hi_[k];
    std::uint64_t key;
    std::memcpy(&key, &x, sizeof key);
    return (cell << kDigit) + std::size_t((key - start_[cell]) >> shift_[cell]);
  }

 private:
  std::size_t last_;
  double hi_[kMaxCollected];
  std::uint64_t start_[kMaxCollected];
  int shift_[kMaxCollected];
};

// A thread's tally, its hits, and how many of them belong to each place.
class Counter {
 public:
  Counter(const Cells& cells, bool table);
  // The tally with room for so many hits; they are dropped once there are more than the limit.
  Tally* prepare(std::size_t n, std::size_t limit);
  void keep();

 private:
  friend class Percentiles;
  Tally tally_{};
  std::unique_ptr<std::uint32_t[]> table_;
  Hits hits_;
  Sorter sorter_;
  std::vector<std::uint32_t> counts_;
  std::size_t kept_ = 0;
  bool full_ = false;
};

}  // namespace tensortap
