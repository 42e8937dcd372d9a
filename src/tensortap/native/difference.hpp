// What the parts of a difference share. Plain data and declarations only: like core.hpp, this header
// is compiled once for each instruction set.
#pragma once

#include "core.hpp"

namespace tensortap {

// Two runs of elements of one length; r is the reference, c the candidate, d = c - r.
struct Pair {
  const char *r, *c;
  int r_dtype, c_dtype;
  const double *r_table, *c_table;  // what the 256 values of a one-byte format mean; else null
  double rtol, atol;
  // Moments are taken of values times these powers of two, where squares would leave float64.
  double r_scale, c_scale, d_scale, relative_scale;
};

// What is known of a run of pairs. All but the counts are of the finite ones.
struct PairState {
  std::int64_t finite, agreeing, disagreeing, mismatched;
  bool differs;  // some bytes do
  double r_mean, c_mean, d_mean, r_m2, c_m2, d_m2, rd, rc;  // rd, rc: co-moments
  // What rounding took from the means: far from zero it is more than their blocks differ by.
  double r_low, c_low, d_low;
  double r_abs, d_abs, relative, rd_sum, rc_sum;            // plain sums, of products too
  double relative_top, r_top, c_top;                        // maxima; r_top, c_top of wide formats
};

struct Largest {
  double value;  // of |d|; -1 for none
  std::int64_t at;
  double r, c;
};

constexpr std::size_t kMaxCells = 16;
constexpr std::size_t kMaxCollected = 8;

// Disjoint closed intervals of |d| that the percentiles may lie in. The first `collected` ones,
// ascending, give up their values; of the others, single points that many values share, only counts
// are of interest.
struct Cells {
  std::size_t count, collected;
  double lo[kMaxCells], hi[kMaxCells];
  // The same for |d| rounded to float.
  float lo32[kMaxCells], hi32[kMaxCells];
  bool narrow;   // such bounds exist, ...
  bool checked;  // ... but hold only where rounding changes nothing
};

// A thread's findings.
struct Tally {
  std::int64_t at_least[kMaxCells];  // values >= lo
  std::int64_t above[kMaxCells];     // points only: values > hi
  double* hits;                      // values in the collected cells; a call appends at most its n
  std::size_t used;
  std::uint32_t* table;  // buckets of a histogram, kBuckets / 2 + 1 of them; may be null
};

// Pairs that are worked on at a time, in L1.
constexpr std::size_t kPairBlock = 1024;
constexpr std::size_t kPadding = 64;

struct PairKernels {
  // At most kChunk pairs from `start` on. `largest` is changed only by a larger |d|, so its holder
  // must come here in order. With `cells`, `tally` is added to.
  void (*chunk)(const Pair& pair, std::size_t start, std::size_t n, const Cells* cells,
                PairState* state, Largest* largest, Tally* tally);
  // |d| of a few pairs; NaN where either is not finite.
  void (*distances)(const Pair& pair, std::size_t start, std::size_t n, double* out);
  // What `chunk` does with its cells, for at most kPairBlock distances in a room that has kPadding
  // to spare.
  void (*count)(double* distances, std::size_t n, const Cells& cells, Tally* tally);
  // Rows of `width` from `first` on, columns from `left` up to `right`. Four columns each, as in
  // numerics/profile.py, added to.
  void (*profile)(const Pair& pair, std::size_t width, std::size_t first, std::size_t rows,
                  std::size_t left, std::size_t right, double* tokens, double* channels);
};

extern const PairKernels pair_kernels_baseline;
#ifdef TENSORTAP_X86_64
extern const PairKernels pair_kernels_avx2;
extern const PairKernels pair_kernels_avx512;
#endif
const PairKernels* pair_kernels_at(int index);  // as kernels_at; -1 is the active one

constexpr int kDifferenceColumns = 27;

class Percentiles;

Pair make_pair(const void* r, int r_dtype, const void* c, int c_dtype);

// Write kDifferenceColumns doubles; `percentiles`, which must have been planned, may be null.
void difference(const PairKernels& kernels, Pair pair, std::size_t n, double* out,
                Percentiles* percentiles, int threads);

void profile(const PairKernels& kernels, const Pair& pair, std::size_t rows, std::size_t width,
             double* tokens, double* channels, int threads);

}  // namespace tensortap
