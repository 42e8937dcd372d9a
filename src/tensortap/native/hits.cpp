// Where hits are kept.

#include "hits.hpp"

#include <cstdlib>
#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace tensortap {

using std::size_t;

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
  if (table) table_.reset(new std::uint32_t[kBuckets / 2 + 1]());
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

}  // namespace tensortap
