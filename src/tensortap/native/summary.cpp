// From chunks to a row: who computes which chunk, and how their states become one.

#include "core.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace tensortap {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Outside, squares leave the range of float64 (numerics/reference.py has the same numbers).
constexpr double kTooLarge = 1e150, kTooSmall = 1e-140;
const double kScale = std::ldexp(1.0, 600);

State empty_state() {
  State s{};
  s.min = std::numeric_limits<double>::infinity();
  s.max = -s.min;
  return s;
}

void merge(State& a, const State& b) {
  a.nan += b.nan;
  a.posinf += b.posinf;
  a.neginf += b.neginf;
  a.zeros += b.zeros;
  a.subnormal += b.subnormal;
  a.saturated += b.saturated;
  if (b.finite == 0) return;
  if (a.finite == 0) {
    a.finite = b.finite, a.mean = b.mean, a.m2 = b.m2, a.min = b.min, a.max = b.max;
    return;
  }
  a.min = b.min < a.min ? b.min : a.min;
  a.max = b.max > a.max ? b.max : a.max;
  const double na = double(a.finite), nb = double(b.finite), n = na + nb;
  const double delta = b.mean - a.mean;
  a.mean += delta * (nb / n);
  a.m2 += b.m2 + delta * delta * (na * nb / n);
  a.finite += b.finite;
}

// A thread's counters. 32 bits are enough between two calls of `flush`.
class Tables {
 public:
  Tables() : counters_(new std::uint32_t[kTables * kTableStride]()) {}
  std::uint32_t* get() { return counters_.get(); }

  void flush(std::int64_t* histogram) {
    static_assert(kTables == 4, "the sum below has four terms");
    const std::uint32_t* t = counters_.get();
    for (std::size_t k = 0; k < kBuckets; ++k)
      histogram[k] += t[k] + t[kTableStride + k] + t[2 * kTableStride + k] + t[3 * kTableStride + k];
    std::memset(counters_.get(), 0, kTables * kTableStride * sizeof(std::uint32_t));
  }

 private:
  std::unique_ptr<std::uint32_t[]> counters_;
};

// Kept between calls: hooks ask for small histograms, and 128 KB are dear to allocate each time.
Tables& own_tables() {
  thread_local Tables tables;
  return tables;
}

State run_chunks(const Kernels& kernels, const char* data, std::size_t n, int dtype, double scale,
                 std::int64_t* histogram, int threads) {
  const std::size_t size = element_size(dtype), chunks = (n + kChunk - 1) / kChunk;
  const auto one = [&](std::size_t c, std::uint32_t* table) {
    const std::size_t start = c * kChunk, count = n - start < kChunk ? n - start : kChunk;
    return kernels.chunk(data + start * size, count, dtype, scale, table);
  };
  constexpr std::size_t kFlush = (std::size_t(1) << 31) / kChunk;
  State total = empty_state();
  if (threads <= 1) {
    std::uint32_t* table = histogram ? own_tables().get() : nullptr;
    for (std::size_t c = 0; c < chunks; ++c) {
      merge(total, one(c, table));
      if (table && c % kFlush == kFlush - 1) own_tables().flush(histogram);
    }
    if (table) own_tables().flush(histogram);
    return total;
  }
#ifdef _OPENMP
  std::unique_ptr<State[]> states(new State[chunks]);
#pragma omp parallel num_threads(threads)
  {
    std::uint32_t* table = histogram ? own_tables().get() : nullptr;
    std::size_t done = 0;
#pragma omp for schedule(dynamic, 2)
    for (std::size_t c = 0; c < chunks; ++c) {
      states[c] = one(c, table);
      if (table && ++done % kFlush == 0) {
#pragma omp critical(tensortap_histogram)
        own_tables().flush(histogram);
      }
    }
    if (table) {
#pragma omp critical(tensortap_histogram)
      own_tables().flush(histogram);
    }
  }
  for (std::size_t c = 0; c < chunks; ++c) merge(total, states[c]);
#endif
  return total;
}

std::size_t bucket_of(double value) {
  const float narrow = static_cast<float>(value);
  std::uint32_t bits;
  std::memcpy(&bits, &narrow, 4);
  return bits >> 19;
}

double smallest_normal(int dtype) {
  switch (dtype) {
    case kFloat8E4M3FN: return std::ldexp(1.0, -6);
    case kFloat8E5M2: return std::ldexp(1.0, -14);
    case kFloat8E4M3FNUZ: return std::ldexp(1.0, -7);
    case kFloat8E5M2FNUZ: return std::ldexp(1.0, -15);
    default: return 0;
  }
}

bool saturates(int dtype, double value) {
  switch (dtype) {
    case kInt8: return value == 127 || value == -128;
    case kUint8: return value == 255;
    case kFloat8E4M3FN: return std::fabs(value) == 448;
    case kFloat8E5M2: case kFloat8E5M2FNUZ: return std::fabs(value) == 57344;
    case kFloat8E4M3FNUZ: return std::fabs(value) == 240;
    case kFloat8E8M0FNU: return value == std::ldexp(1.0, 127);
    default: return false;
  }
}

// A byte has 256 values: count them, and everything else is exact arithmetic on the counts.
State run_bytes(const Kernels& kernels, const char* data, std::size_t n, int dtype,
                std::int64_t* histogram, int threads) {
  constexpr std::size_t kPart = 1 << 20;
  std::int64_t counts[256] = {};
  const std::size_t parts = (n + kPart - 1) / kPart;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : counts[:256]) num_threads(threads) \
    if (threads > 1)
#endif
  for (std::size_t p = 0; p < parts; ++p) {
    const std::size_t start = p * kPart;
    kernels.count_bytes(data + start, n - start < kPart ? n - start : kPart, counts);
  }
  State s = empty_state();
  double sum = 0;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const std::int64_t c = counts[byte];
    if (!c) continue;
    const double v = decode_byte(dtype, byte);
    if (std::isnan(v)) { s.nan += c; continue; }
    if (std::isinf(v)) { (v > 0 ? s.posinf : s.neginf) += c; continue; }
    s.finite += c;
    if (v == 0) s.zeros += c;
    else if (std::fabs(v) < smallest_normal(dtype)) s.subnormal += c;
    if (saturates(dtype, v)) s.saturated += c;
    s.min = v < s.min ? v : s.min;
    s.max = v > s.max ? v : s.max;
    sum += v * double(c);
    if (histogram) histogram[bucket_of(v)] += c;
  }
  if (!s.finite) return s;
  s.mean = s.min == s.max ? s.min : sum / double(s.finite);
  for (unsigned byte = 0; byte < 256; ++byte) {
    const double v = decode_byte(dtype, byte);
    if (counts[byte] && std::isfinite(v)) s.m2 += double(counts[byte]) * (v - s.mean) * (v - s.mean);
  }
  return s;
}

void write_row(const State& s, std::size_t n, double scale, double* out) {
  const double finite = double(s.finite);
  out[0] = double(n);
  out[1] = double(s.nan);
  out[2] = double(s.posinf);
  out[3] = double(s.neginf);
  out[4] = double(s.zeros);
  out[5] = double(s.subnormal);
  out[6] = double(s.saturated);
  if (!s.finite) {
    for (int k = 7; k < 12; ++k) out[k] = kNan;
    out[12] = 0;
    return;
  }
  const double low = s.min + 0.0, high = s.max + 0.0;
  out[7] = s.mean / scale + 0.0;  // zeros have a mean of 0, not of -0
  out[8] = std::sqrt(s.m2 / finite) / scale;
  out[9] = low;
  out[10] = high;
  out[11] = std::fabs(low) > std::fabs(high) ? std::fabs(low) : std::fabs(high);
  out[12] = std::sqrt(s.m2 + finite * s.mean * s.mean) / scale;
}

}  // namespace

int thread_count(int requested, std::size_t tasks) {
#ifdef _OPENMP
  if (omp_in_parallel()) return 1;
  const int limit = requested > 0 ? requested : omp_get_max_threads();
  return std::size_t(limit) < tasks ? limit : int(tasks ? tasks : 1);
#else
  (void)requested, (void)tasks;
  return 1;
#endif
}

void summarize(const Kernels& kernels, const void* data, std::size_t n, int dtype, double* out,
               std::int64_t* histogram, int threads) {
  const auto* bytes = static_cast<const char*>(data);
  for (std::size_t k = 0; k < kFirst; ++k)
    out[kColumns + k] = k < n ? decode_element(dtype, data, k) : kNan;
  // Waking the others costs more than half a megabyte's worth of work.
  const std::size_t tasks = n * element_size(dtype) >> 19;
  threads = thread_count(threads, tasks);
  if (is_byte(dtype)) {
    write_row(run_bytes(kernels, bytes, n, dtype, histogram, threads), n, 1.0, out);
    return;
  }
  double scale = 1.0;
  State s = run_chunks(kernels, bytes, n, dtype, scale, histogram, threads);
  if (dtype == kFloat64 && s.finite) {
    const double absmax = std::fabs(s.min) > std::fabs(s.max) ? std::fabs(s.min) : std::fabs(s.max);
    if (absmax > kTooLarge) scale = 1 / kScale;
    else if (absmax > 0 && absmax < kTooSmall) scale = kScale;
    if (scale != 1.0) s = run_chunks(kernels, bytes, n, dtype, scale, nullptr, threads);
  }
  write_row(s, n, scale, out);
}

}  // namespace tensortap
