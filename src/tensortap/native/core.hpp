// What the parts of the core share. Plain data and declarations only: this header is compiled once
// for each instruction set, so it must not define functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensortap {

// The order is that of CODES in numerics/native.py.
enum Dtype : int {
  kFloat32, kFloat64, kFloat16, kBfloat16,
  kInt8, kUint8, kInt16, kUint16, kInt32, kUint32, kInt64, kUint64,
  kBool, kFloat8E4M3FN, kFloat8E5M2, kFloat8E4M3FNUZ, kFloat8E5M2FNUZ, kFloat8E8M0FNU,
  kDtypes
};

constexpr int kColumns = 13;
constexpr int kFirst = 10;
constexpr std::size_t kBuckets = 8192;

// Values enter the tables of a histogram at bucket `key`; what is not finite goes to kBuckets.
// Several tables, so that equal neighbours do not wait for each other's increment.
constexpr std::size_t kTableStride = kBuckets + 64;
constexpr std::size_t kTables = 4;

// What is known of a run of values. The moments are of the finite ones.
struct State {
  std::int64_t finite, nan, posinf, neginf, zeros, subnormal, saturated;
  double mean, m2, min, max;
};

// Elements a task. Fixed, so that a result does not depend on the number of threads.
constexpr std::size_t kChunk = 1 << 16;

struct Kernels {
  const char* name;
  // Summarise at most kChunk elements; `table` (kTables * kTableStride counters) may be null.
  // float64 is multiplied by `scale` before moments are taken; min and max are not.
  State (*chunk)(const void* data, std::size_t n, int dtype, double scale, std::uint32_t* table);
  // Add the number of each byte value to counts[256].
  void (*count_bytes)(const void* data, std::size_t nbytes, std::int64_t* counts);
  // The OR of all bytes: the least a pass over memory can cost.
  std::uint64_t (*read)(const void* data, std::size_t nbytes);
};

const Kernels& active_kernels();
const Kernels* kernels_at(int index);  // 0 baseline, 1 AVX2, 2 AVX-512; null when the CPU lacks it

int thread_count(int requested, std::size_t tasks);

bool is_byte(int dtype);
std::size_t element_size(int dtype);
double decode_byte(int dtype, unsigned byte);
double decode_element(int dtype, const void* data, std::size_t index);

// Write kColumns + kFirst doubles; add to histogram[kBuckets] when it is not null.
void summarize(const Kernels& kernels, const void* data, std::size_t n, int dtype, double* out,
               std::int64_t* histogram, int threads);

struct Digest { std::uint64_t low, high; };

void copy(void* dst, const void* src, std::size_t nbytes, int threads);
Digest digest(void* dst, const void* src, std::size_t nbytes, int threads);  // dst may be null

}  // namespace tensortap
