// From chunks to a row: who computes which chunk, and how their states become one.

#include "difference.hpp"

#include "percentiles.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

namespace tensortap {
namespace {

using std::int64_t;
using std::size_t;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Outside, squares leave the range of float64 (numerics/reference_difference.py has the same).
constexpr double kTooLarge = 1e140, kTooSmall = 1e-140;
const double kScale = std::ldexp(1.0, 600);

double scale_for(double top) {
  if (top > kTooLarge) return 1 / kScale;
  return top > 0 && top < kTooSmall ? kScale : 1.0;
}

// The merge of difference_kernels.cpp, compiled for every machine.
void merge(PairState& a, const PairState& b) {
  a.agreeing += b.agreeing;
  a.disagreeing += b.disagreeing;
  a.mismatched += b.mismatched;
  a.differs |= b.differs;
  a.r_top = std::max(a.r_top, b.r_top);
  a.c_top = std::max(a.c_top, b.c_top);
  a.relative_top = std::max(a.relative_top, b.relative_top);
  if (b.finite == 0) return;
  const double na = double(a.finite), nb = double(b.finite), n = na + nb, share = nb / n;
  const double both = na * share;
  const auto mean = [&](double& ours, double& our_low, double theirs, double their_low) {
    const double step = (theirs - ours) + (their_low - our_low);
    if (a.finite == 0) {
      ours = theirs, our_low = their_low;
    } else {
      const double change = our_low + step * share, sum = ours + change, part = sum - ours;
      our_low = (ours - (sum - part)) + (change - part);
      ours = sum;
    }
    return step;
  };
  const double r = mean(a.r_mean, a.r_low, b.r_mean, b.r_low);
  const double c = mean(a.c_mean, a.c_low, b.c_mean, b.c_low);
  const double d = mean(a.d_mean, a.d_low, b.d_mean, b.d_low);
  a.r_m2 += b.r_m2 + r * r * both;
  a.c_m2 += b.c_m2 + c * c * both;
  a.d_m2 += b.d_m2 + d * d * both;
  a.rd += b.rd + r * d * both;
  a.rc += b.rc + r * c * both;
  a.r_abs += b.r_abs;
  a.d_abs += b.d_abs;
  a.relative += b.relative;
  a.rd_sum += b.rd_sum;
  a.rc_sum += b.rc_sum;
  a.finite += b.finite;
}

struct Result {
  PairState state;
  Largest largest;
};

Result run_chunks(const PairKernels& kernels, const Pair& pair, size_t n, Percentiles* percentiles,
                  int threads) {
  const size_t chunks = (n + kChunk - 1) / kChunk;
  Result all{PairState{}, Largest{-1, -1, kNan, kNan}};
  const Cells* cells = percentiles ? &percentiles->cells() : nullptr;
  const size_t limit = percentiles ? percentiles->hit_limit(threads) : 0;
  const auto one = [&](size_t c, PairState* state, Largest* largest, Counter* counter) {
    const size_t start = c * kChunk;
    const size_t size = std::min(n - start, kChunk);
    kernels.chunk(pair, start, size, cells, state, largest,
                  counter ? counter->prepare(size, limit) : nullptr);
    if (counter) counter->keep();
  };
  if (threads <= 1) {
    std::unique_ptr<Counter> counter;
    if (percentiles) counter = percentiles->counter();
    for (size_t c = 0; c < chunks; ++c) {
      PairState state;
      one(c, &state, &all.largest, counter.get());
      merge(all.state, state);
    }
    if (counter) percentiles->absorb(*counter);
    return all;
  }
#ifdef _OPENMP
  const std::unique_ptr<PairState[]> states(new PairState[chunks]);
#pragma omp parallel num_threads(threads)
  {
    Largest largest = all.largest;
    std::unique_ptr<Counter> counter;
    if (percentiles) counter = percentiles->counter();
    // Dynamic schedules hand out chunks in ascending order, so a thread meets the first of its
    // equals first.
#pragma omp for schedule(monotonic : dynamic, 2) nowait
    for (size_t c = 0; c < chunks; ++c) one(c, &states[c], &largest, counter.get());
#pragma omp critical(tensortap_difference)
    {
      if (largest.value > all.largest.value ||
          (largest.value == all.largest.value && largest.at < all.largest.at))
        all.largest = largest;
      if (counter) percentiles->absorb(*counter);
    }
  }
  for (size_t c = 0; c < chunks; ++c) merge(all.state, states[c]);
#endif
  return all;
}

double over(double part, double one, double two) {
  if (!(one > 0 && two > 0)) return 0;
  return std::min(1.0, std::max(-1.0, part / one / two));
}

// The columns of difference_row.State in numerics/difference_row.py.
void write_row(const Result& result, const Pair& pair, size_t n, double* out) {
  const PairState& s = result.state;
  const Largest& top = result.largest;
  const bool any = s.finite > 0;
  const double count = double(s.finite);
  const auto std_of = [&](double m2, double scale) {
    return any ? std::sqrt(std::max(0.0, m2) / count) / scale : kNan;
  };
  // Roots in the scaled domain, from which angles are taken.
  const auto length = [&](double m2, double mean) { return std::sqrt(m2 + count * mean * mean); };
  const double rl = length(s.r_m2, s.r_mean), cl = length(s.c_m2, s.c_mean);
  const double dl = length(s.d_m2, s.d_mean);
  double* o = out;
  *o++ = double(n);
  *o++ = count;
  *o++ = double(s.agreeing);
  *o++ = double(s.disagreeing);
  *o++ = double(s.mismatched);
  *o++ = s.differs ? 0.0 : 1.0;
  *o++ = any ? s.d_mean / pair.d_scale : kNan;
  *o++ = std_of(s.d_m2, pair.d_scale);
  *o++ = any ? s.d_abs / count / pair.d_scale : kNan;
  *o++ = any ? dl / pair.d_scale : 0;
  *o++ = any ? top.value : kNan;
  *o++ = any ? double(top.at) : -1;
  *o++ = any ? top.r : kNan;
  *o++ = any ? top.c : kNan;
  *o++ = any ? s.r_mean / pair.r_scale : kNan;
  *o++ = std_of(s.r_m2, pair.r_scale);
  *o++ = any ? rl / pair.r_scale : 0;
  *o++ = any ? s.r_abs / count / pair.r_scale : kNan;
  *o++ = any ? s.c_mean / pair.c_scale : kNan;
  *o++ = std_of(s.c_m2, pair.c_scale);
  *o++ = any ? cl / pair.c_scale : 0;
  *o++ = over(s.rd_sum, rl, dl);
  *o++ = over(s.rd, std::sqrt(s.r_m2), std::sqrt(s.d_m2));
  *o++ = any ? s.relative_top : kNan;
  *o++ = any ? s.relative / count / pair.relative_scale : kNan;
  *o++ = over(s.rc_sum, rl, cl);
  *o++ = over(s.rc, std::sqrt(s.r_m2), std::sqrt(s.c_m2));
}

// What the values of a one-byte format mean.
const double* table_of(int dtype) {
  struct Tables {
    double values[kDtypes][256];
    Tables() {
      for (int d = 0; d < kDtypes; ++d)
        for (unsigned byte = 0; byte < 256 && is_byte(d); ++byte)
          values[d][byte] = decode_byte(d, byte);
    }
  };
  static const Tables tables;
  return is_byte(dtype) ? tables.values[dtype] : nullptr;
}

bool holds_wide(int dtype) { return dtype == kFloat64; }

}  // namespace

Pair make_pair(const void* r, int r_dtype, const void* c, int c_dtype) {
  return {static_cast<const char*>(r), static_cast<const char*>(c), r_dtype, c_dtype,
          table_of(r_dtype), table_of(c_dtype), 0, 0, 1, 1, 1, 1};
}

void difference(const PairKernels& kernels, Pair pair, size_t n, double* out,
                Percentiles* percentiles, int threads) {
  const size_t bytes = n * (element_size(pair.r_dtype) + element_size(pair.c_dtype));
  threads = thread_count(threads, bytes >> 19);
  Result result = run_chunks(kernels, pair, n, percentiles, threads);
  if (holds_wide(pair.r_dtype) || holds_wide(pair.c_dtype)) {
    pair.r_scale = scale_for(result.state.r_top);
    pair.c_scale = scale_for(result.state.c_top);
    pair.d_scale = scale_for(result.largest.value);
    pair.relative_scale = scale_for(result.state.relative_top);
    if (pair.r_scale != 1 || pair.c_scale != 1 || pair.d_scale != 1 || pair.relative_scale != 1)
      result = run_chunks(kernels, pair, n, nullptr, threads);
  }
  result.state.differs |= pair.r_dtype != pair.c_dtype;
  write_row(result, pair, n, out);
}

void profile(const PairKernels& kernels, const Pair& pair, size_t rows, size_t width,
             double* tokens, double* channels, int threads) {
  constexpr size_t kWidest = size_t(1) << 16;  // columns of a task
  constexpr size_t kTask = size_t(1) << 18;    // elements of a task, at least
  constexpr size_t kTasks = 64;                // of a column of tasks, at most: each has channels
  const size_t bands = (width + kWidest - 1) / kWidest;
  size_t tall = (kTask + std::min(width, kWidest) - 1) / std::min(width, kWidest);
  tall = std::max(tall, (rows + kTasks - 1) / kTasks);
  const size_t floors = (rows + tall - 1) / tall, tasks = floors * bands;
  const size_t bytes = rows * width * (element_size(pair.r_dtype) + element_size(pair.c_dtype));
  const int team = thread_count(threads, std::min(tasks, bytes >> 19));
  std::vector<double> partial_tokens(bands > 1 ? 4 * rows * bands : 0, 0.0);
  std::vector<double> partial_channels(floors > 1 ? 4 * width * floors : 0, 0.0);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
#else
  (void)team;
#endif
  for (size_t t = 0; t < tasks; ++t) {
    const size_t floor = t / bands, band = t % bands, first = floor * tall;
    const size_t left = band * kWidest, right = std::min(width, left + kWidest);
    double* own_tokens = bands > 1 ? partial_tokens.data() + 4 * rows * band : tokens;
    double* own_channels = floors > 1 ? partial_channels.data() + 4 * width * floor : channels;
    kernels.profile(pair, width, first, std::min(tall, rows - first), left, right,
                    own_tokens + 4 * first, own_channels + 4 * left);
  }
  const auto gather = [](double* to, const std::vector<double>& from, size_t length, size_t parts) {
    for (size_t p = 0; p < parts; ++p)
      for (size_t k = 0; k < 4 * length; ++k) {
        const double x = from[4 * length * p + k];
        to[k] = k % 4 == 2 ? std::max(to[k], x) : to[k] + x;
      }
  };
  if (bands > 1) gather(tokens, partial_tokens, rows, bands);
  if (floors > 1) gather(channels, partial_channels, width, floors);
}

}  // namespace tensortap
