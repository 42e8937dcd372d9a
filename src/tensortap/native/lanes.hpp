// Vectors of the instruction set that is being compiled for, and the formats of elements. Included
// only by sources that are compiled once for each set, and all of internal linkage: the linker must
// never keep the AVX-512 copy of a function for everybody.
#pragma once

#include "core.hpp"

#include <cstring>
#include <limits>

#if defined(TENSORTAP_ISA_avx2) || defined(TENSORTAP_ISA_avx512)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tensortap {
namespace {

#if defined(TENSORTAP_ISA_avx512)
constexpr std::size_t W = 64;
#elif defined(TENSORTAP_ISA_avx2)
constexpr std::size_t W = 32;
#else
constexpr std::size_t W = 16;
#endif

using std::int32_t;
using std::int64_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;

typedef int16_t vi16 __attribute__((vector_size(W)));
typedef uint16_t vu16 __attribute__((vector_size(W)));
typedef int32_t vi32 __attribute__((vector_size(W)));
typedef uint32_t vu32 __attribute__((vector_size(W)));
typedef int64_t vi64 __attribute__((vector_size(W)));
typedef uint64_t vu64 __attribute__((vector_size(W)));
typedef double vf64 __attribute__((vector_size(W)));
typedef float vf32 __attribute__((vector_size(W)));
typedef float vf32h __attribute__((vector_size(W / 2)));  // converts to one vf64

// Elements may lie anywhere: a memory-mapped file aligns nothing. Without this, loops that the
// compiler vectorises would first step to a boundary that is never met.
template <class T>
struct Anywhere {
  typedef T type __attribute__((aligned(1), may_alias));
};
template <class T>
using Loose = typename Anywhere<T>::type;

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
inline V vmin(V a, V b) { return a < b ? a : b; }
template <class V>
inline V vmax(V a, V b) { return a > b ? a : b; }

// Compilers convert vectors and count matches in more steps than the instructions need.
inline vf64 to_double(vf32h v) {
#if defined(TENSORTAP_ISA_avx512)
  return (vf64)_mm512_cvtps_pd((__m256)v);
#elif defined(TENSORTAP_ISA_avx2)
  return (vf64)_mm256_cvtps_pd((__m128)v);
#else
  return __builtin_convertvector(v, vf64);
#endif
}

inline vf64 least_of(vf64 a, vf64 b) {
#if defined(TENSORTAP_ISA_avx512)
  return (vf64)_mm512_min_pd((__m512d)a, (__m512d)b);
#elif defined(TENSORTAP_ISA_avx2)
  return (vf64)_mm256_min_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
  return (vf64)_mm_min_pd((__m128d)a, (__m128d)b);
#else
  return a < b ? a : b;
#endif
}

inline void count_equal(vi32& count, vu32 a, vu32 b) {
#if defined(TENSORTAP_ISA_avx512)
  const __mmask16 equal = _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b);
  count = (vi32)_mm512_mask_sub_epi32((__m512i)count, equal, (__m512i)count, _mm512_set1_epi32(-1));
#else
  count -= vi32(a == b);
#endif
}

inline void count_equal(vi16& count, vu16 a, vu16 b) {
#if defined(TENSORTAP_ISA_avx512)
  const __mmask32 equal = _mm512_cmpeq_epi16_mask((__m512i)a, (__m512i)b);
  count = (vi16)_mm512_mask_sub_epi16((__m512i)count, equal, (__m512i)count, _mm512_set1_epi16(-1));
#else
  count -= vi16(a == b);
#endif
}

inline void count_below(vi16& count, vu16 a, vu16 b) {
#if defined(TENSORTAP_ISA_avx512)
  const __mmask32 below = _mm512_cmplt_epu16_mask((__m512i)a, (__m512i)b);
  count = (vi16)_mm512_mask_sub_epi16((__m512i)count, below, (__m512i)count, _mm512_set1_epi16(-1));
#else
  count -= vi16(a < b);
#endif
}

inline float as_float(uint32_t b) { float f; std::memcpy(&f, &b, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t b; std::memcpy(&b, &f, 4); return b; }
inline double as_float(uint64_t b) { double f; std::memcpy(&f, &b, 8); return f; }

template <class V>
inline double horizontal(V v) {
  double total = 0;
  for (size_t i = 0; i < sizeof(V) / 8; ++i) total += v[i];
  return total;
}

// ---- Formats -----------------------------------------------------------------------------------
// Each gives the bits of a wider IEEE format whose arithmetic is exact for it, and there the
// pattern of its smallest normal and of its largest finite value.

struct Float32 {
  using Store = uint32_t;
  using Bits = uint32_t;
  using Signed = int32_t;
  static constexpr Bits kSign = 0x80000000u, kInf = 0x7f800000u;
  static constexpr Bits kTiny = 0x00800000u, kMax = 0x7f7fffffu;
  static constexpr bool kTopBits = true;
  static Bits widen(Store s) { return s; }
};

struct Bfloat16 : Float32 {
  using Store = uint16_t;
  static constexpr Bits kMax = 0x7f7f0000u;
  static constexpr bool kTopBits = true;
  static constexpr uint16_t kTiny16 = 0x0080, kMax16 = 0x7f7f;
  static Bits widen(Store s) { return uint32_t(s) << 16; }
};

struct Float16 : Float32 {
  using Store = uint16_t;
  static constexpr Bits kTiny = 0x38800000u /* 2^-14 */, kMax = 0x477fe000u /* 65504 */;
  static constexpr bool kTopBits = false;
  static constexpr uint16_t kTiny16 = 0x0400, kMax16 = 0x7bff;
  static Bits widen(Store s) {
    const uint32_t magnitude = uint32_t(s & 0x7fff) << 13;
    const uint32_t value = as_bits(as_float(magnitude) * 0x1p112f);
    const uint32_t special = magnitude | 0x7f800000u;
    return (magnitude >= 0x0f800000u ? special : value) | (uint32_t(s & 0x8000) << 16);
  }
};

struct Float64 {
  using Store = uint64_t;
  using Bits = uint64_t;
  using Signed = int64_t;
  static constexpr Bits kSign = 1ull << 63, kInf = 0x7ffull << 52;
  static constexpr Bits kTiny = 1ull << 52, kMax = kInf - 1;
  static constexpr bool kTopBits = false;
  static Bits widen(Store s) { return s; }
};

// Subnormals count as what they are, also where torch.set_flush_denormal(True) is in force.
class KeepSubnormals {
#if defined(__SSE2__)
 public:
  KeepSubnormals() : saved_(_mm_getcsr()) { if (saved_ & kFlush) _mm_setcsr(saved_ & ~kFlush); }
  ~KeepSubnormals() { if (saved_ & kFlush) _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlush = 0x8040;
  unsigned saved_;
#endif
};

}  // namespace
}  // namespace tensortap
