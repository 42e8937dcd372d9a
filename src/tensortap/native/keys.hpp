// Non-negative doubles as integers, which order the same way.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace tensortap {

constexpr double kInf = std::numeric_limits<double>::infinity();

inline std::uint64_t key_of(double x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x, 8);
  return bits;
}

inline double from_key(std::uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

// By how much to shift what lies between two keys, so that kDigit bits are left.
constexpr int kDigit = 12;

inline int digit_shift(std::uint64_t lo, std::uint64_t hi) {
  int shift = 0;
  while (((hi - lo) >> shift) >> kDigit) ++shift;
  return shift;
}

}  // namespace tensortap
