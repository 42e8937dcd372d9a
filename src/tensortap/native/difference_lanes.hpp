// What the inner loops of a difference need beyond lanes.hpp: fused operations by name (contraction
// is off here, so that |d| > atol + rtol * |r| means the same everywhere), and elements of any
// format as floats or doubles.
#pragma once

#include "difference.hpp"
#include "lanes.hpp"

namespace tensortap {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kEpsilon = 1e-8;  // of |d| / (|r| + epsilon)
constexpr double kExactIntegers = 0x1p53;

inline vf64 fused(vf64 a, vf64 b, vf64 c) {
#if defined(TENSORTAP_ISA_avx512)
  return (vf64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(TENSORTAP_ISA_avx2)
  return (vf64)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

// Of numbers that are not negative, which order as their bits do; units for those are freer.
inline vf64 greatest_of(vf64 a, vf64 b) {
#if defined(TENSORTAP_ISA_avx512)
  return (vf64)_mm512_max_epi64((__m512i)a, (__m512i)b);
#elif defined(TENSORTAP_ISA_avx2)
  return (vf64)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
  return (vf64)_mm_max_pd((__m128d)a, (__m128d)b);
#else
  return a > b ? a : b;
#endif
}

inline vf64 absolute(vf64 v) { return vf64(vi64(v) & ~int64_t(Float64::kSign)); }
inline vf32 absolute(vf32 v) { return vf32(vi32(v) & 0x7fffffff); }

inline double largest_lane(vf64 v) {
  double top = v[0];
  for (size_t k = 1; k < W / 8; ++k) top = v[k] > top ? v[k] : top;
  return top;
}

// a / b for b well inside the range, to 42 bits at least.
inline vf64 quotient(vf64 a, vf64 b) {
#if defined(TENSORTAP_ISA_avx512)
  const __m512d one = _mm512_set1_pd(1.0), r = _mm512_rcp14_pd((__m512d)b);
  const __m512d e = _mm512_fnmadd_pd((__m512d)b, r, one);  // 1 / b = r (1 + e + e^2 + ...)
  const __m512d q = _mm512_mul_pd((__m512d)a, r);
  return (vf64)_mm512_fmadd_pd(q, _mm512_fmadd_pd(e, e, e), q);
#else
  return a / b;
#endif
}

inline void count_greater(vi64& count, vf64 a, vf64 b) {
#if defined(TENSORTAP_ISA_avx512)
  const __mmask8 greater = _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_GT_OQ);
  count = (vi64)_mm512_mask_sub_epi64((__m512i)count, greater, (__m512i)count, _mm512_set1_epi64(-1));
#else
  count -= vi64(a > b);
#endif
}

// ---- Elements ------------------------------------------------------------------------------------

// W / 4 elements as floats. Exact, also for infinities and NaN.
inline vf32 floats(const char* p, Float32) { return load<vf32>(p); }

inline vf32 floats(const char* p, Bfloat16) {
#if defined(TENSORTAP_ISA_avx512)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (vf32)_mm512_slli_epi32(wide, 16);
#elif defined(TENSORTAP_ISA_avx2)
  return (vf32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__SSE2__)
  return (vf32)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
#else
  vu32 bits;
  for (size_t k = 0; k < W / 4; ++k) bits[k] = Bfloat16::widen(load<uint16_t>(p + 2 * k));
  return vf32(bits);
#endif
}

inline vf32 floats(const char* p, Float16) {
#if defined(TENSORTAP_ISA_avx512)
  return (vf32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(TENSORTAP_ISA_avx2)
  return (vf32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vu32 bits;
  for (size_t k = 0; k < W / 4; ++k) bits[k] = Float16::widen(load<uint16_t>(p + 2 * k));
  return vf32(bits);
#endif
}

template <class F>
inline double element(const char* p, size_t i) {
  using Store = typename F::Store;
  return double(as_float(F::widen(load<Store>(p + i * sizeof(Store)))));
}

template <class F>
inline void decode_floats(const char* data, size_t n, double* out) {
  const auto* p = reinterpret_cast<const Loose<typename F::Store>*>(data);
#pragma omp simd
  for (size_t i = 0; i < n; ++i) out[i] = double(as_float(F::widen(p[i])));
}

template <class T>
inline void decode_integers(const char* data, size_t n, double* out) {
  const auto* p = reinterpret_cast<const Loose<T>*>(data);
#pragma omp simd
  for (size_t i = 0; i < n; ++i) out[i] = double(p[i]);
}

inline void decode(const char* p, int dtype, const double* table, size_t n, double* out) {
  switch (dtype) {
    case kFloat32: return decode_floats<Float32>(p, n, out);
    case kFloat64: return void(std::memcpy(out, p, 8 * n));
    case kFloat16: return decode_floats<Float16>(p, n, out);
    case kBfloat16: return decode_floats<Bfloat16>(p, n, out);
    case kInt8: return decode_integers<std::int8_t>(p, n, out);
    case kUint8: return decode_integers<std::uint8_t>(p, n, out);
    case kInt16: return decode_integers<std::int16_t>(p, n, out);
    case kUint16: return decode_integers<uint16_t>(p, n, out);
    case kInt32: return decode_integers<int32_t>(p, n, out);
    case kUint32: return decode_integers<uint32_t>(p, n, out);
    case kInt64: return decode_integers<int64_t>(p, n, out);
    case kUint64: return decode_integers<uint64_t>(p, n, out);
    default:
      for (size_t i = 0; i < n; ++i) out[i] = table[static_cast<unsigned char>(p[i])];
  }
}

inline size_t bytes_of(int dtype) {  // element_size, without a call into another source
  switch (dtype) {
    case kFloat64: case kInt64: case kUint64: return 8;
    case kFloat32: case kInt32: case kUint32: return 4;
    case kFloat16: case kBfloat16: case kInt16: case kUint16: return 2;
    default: return 1;
  }
}

inline bool is_integer(int dtype) { return (dtype >= kInt8 && dtype <= kUint64) || dtype == kBool; }

// Pairs whose difference float64 cannot be trusted with.
inline bool has_long_integers(const Pair& pair) {
  const bool any = pair.r_dtype == kInt64 || pair.r_dtype == kUint64 || pair.c_dtype == kInt64 ||
                   pair.c_dtype == kUint64;
  return any && is_integer(pair.r_dtype) && is_integer(pair.c_dtype);
}

// An integer as the sign-extended halves of 128 bits.
struct Long {
  uint64_t low;
  int64_t high;
};

inline Long long_at(const char* p, int dtype, double value, size_t i) {
  if (dtype == kUint64) return {load<uint64_t>(p + 8 * i), 0};
  const int64_t v = dtype == kInt64 ? load<int64_t>(p + 8 * i) : int64_t(value);
  return {uint64_t(v), v < 0 ? -1 : 0};
}

inline double long_difference(Long c, Long r) {
  uint64_t low = c.low - r.low;
  int64_t high = c.high - r.high - (c.low < r.low);
  const bool negative = high < 0;
  if (negative) {
    high = ~high + (low == 0);
    low = uint64_t(0) - low;
  }
  // A 65th bit is kept by halving; the bit that this drops still decides how to round.
  const double magnitude = high ? 2.0 * double((1ull << 63) | (low >> 1) | (low & 1)) : double(low);
  return negative ? -magnitude : magnitude;
}

// All three as doubles. A view of float64 is not copied: *r and *c say where the values are.
struct Wide {
  alignas(64) double r_room[kPairBlock], c_room[kPairBlock], d[kPairBlock];
  const Loose<double>*r, *c;

  void fill(const Pair& pair, size_t start, size_t n) {
    const char* rp = pair.r + start * bytes_of(pair.r_dtype);
    const char* cp = pair.c + start * bytes_of(pair.c_dtype);
    r = r_room, c = c_room;
    if (pair.r_dtype == kFloat64) r = reinterpret_cast<const Loose<double>*>(rp);
    else decode(rp, pair.r_dtype, pair.r_table, n, r_room);
    if (pair.c_dtype == kFloat64) c = reinterpret_cast<const Loose<double>*>(cp);
    else decode(cp, pair.c_dtype, pair.c_table, n, c_room);
  }
  void subtract(const Pair& pair, size_t start, size_t n) {
    if (has_long_integers(pair)) {
      const char* rp = pair.r + start * bytes_of(pair.r_dtype);
      const char* cp = pair.c + start * bytes_of(pair.c_dtype);
      for (size_t i = 0; i < n; ++i)
        d[i] = long_difference(long_at(cp, pair.c_dtype, c[i], i), long_at(rp, pair.r_dtype, r[i], i));
      return;
    }
#pragma omp simd
    for (size_t i = 0; i < n; ++i) d[i] = c[i] - r[i];
  }
};

}  // namespace
}  // namespace tensortap
