// Counting distances by cells, and taking out those that lie in them. Internal linkage, as lanes.hpp.
#pragma once

#include "difference_lanes.hpp"

namespace tensortap {
namespace {

#if defined(TENSORTAP_ISA_avx512)

struct Floats {
  using T = float;
  using V = __m512;
  using Count = __m512i;
  static constexpr size_t kLanes = 16;
  static V spread(T v) { return _mm512_set1_ps(v); }
  static V get(const T* p) { return _mm512_loadu_ps(p); }
  static Count zero() { return _mm512_setzero_si512(); }
  // Count the lanes of x that are at least lo; of those, which are at most hi?
  static uint64_t within(V x, V lo, V hi, Count& at_least) {
    const __mmask16 ge = _mm512_cmp_ps_mask(x, lo, _CMP_GE_OQ);
    at_least = _mm512_mask_sub_epi32(at_least, ge, at_least, _mm512_set1_epi32(-1));
    return _mm512_mask_cmp_ps_mask(ge, x, hi, _CMP_LE_OQ);
  }
  static void above(V x, V hi, Count& count) {
    const __mmask16 gt = _mm512_cmp_ps_mask(x, hi, _CMP_GT_OQ);
    count = _mm512_mask_sub_epi32(count, gt, count, _mm512_set1_epi32(-1));
  }
  static int64_t total(Count c) { return _mm512_reduce_add_epi32(c); }
};

struct Doubles {
  using T = double;
  using V = __m512d;
  using Count = __m512i;
  static constexpr size_t kLanes = 8;
  static V spread(T v) { return _mm512_set1_pd(v); }
  static V get(const T* p) { return _mm512_loadu_pd(p); }
  static Count zero() { return _mm512_setzero_si512(); }
  static uint64_t within(V x, V lo, V hi, Count& at_least) {
    const __mmask8 ge = _mm512_cmp_pd_mask(x, lo, _CMP_GE_OQ);
    at_least = _mm512_mask_sub_epi64(at_least, ge, at_least, _mm512_set1_epi64(-1));
    return _mm512_mask_cmp_pd_mask(ge, x, hi, _CMP_LE_OQ);
  }
  static void above(V x, V hi, Count& count) {
    const __mmask8 gt = _mm512_cmp_pd_mask(x, hi, _CMP_GT_OQ);
    count = _mm512_mask_sub_epi64(count, gt, count, _mm512_set1_epi64(-1));
  }
  static int64_t total(Count c) { return _mm512_reduce_add_epi64(c); }
};

#else

inline uint64_t bits_of(vi32 mask) {
#if defined(TENSORTAP_ISA_avx2)
  return uint64_t(unsigned(_mm256_movemask_ps((__m256)mask)));
#elif defined(__SSE2__)
  return uint64_t(unsigned(_mm_movemask_ps((__m128)mask)));
#else
  uint64_t bits = 0;
  for (size_t k = 0; k < W / 4; ++k) bits |= uint64_t(mask[k] != 0) << k;
  return bits;
#endif
}

inline uint64_t bits_of(vi64 mask) {
#if defined(TENSORTAP_ISA_avx2)
  return uint64_t(unsigned(_mm256_movemask_pd((__m256d)mask)));
#elif defined(__SSE2__)
  return uint64_t(unsigned(_mm_movemask_pd((__m128d)mask)));
#else
  uint64_t bits = 0;
  for (size_t k = 0; k < W / 8; ++k) bits |= uint64_t(mask[k] != 0) << k;
  return bits;
#endif
}

template <class Element, class Vector, class Counts>
struct Lanes {
  using T = Element;
  using V = Vector;
  using Count = Counts;
  static constexpr size_t kLanes = W / sizeof(T);
  static V spread(T v) { return V{} + v; }
  static V get(const T* p) { return load<V>(p); }
  static Count zero() { return Count{}; }
  static uint64_t within(V x, V lo, V hi, Count& at_least) {
    const Count ge = Count(x >= lo);
    at_least -= ge;
    return bits_of(Count(ge & Count(x <= hi)));
  }
  static void above(V x, V hi, Count& count) { count -= Count(x > hi); }
  static int64_t total(Count c) {
    int64_t sum = 0;
    for (size_t k = 0; k < kLanes; ++k) sum += c[k];
    return sum;
  }
};
using Floats = Lanes<float, vf32, vi32>;
using Doubles = Lanes<double, vf64, vi64>;

#endif

constexpr size_t kWords = kPairBlock / 64;

// What the next block will read. While cells are counted, memory would otherwise be idle.
struct Ahead {
  const char *r, *c;
  size_t r_size, c_size;

  void fetch(size_t word) const {
    for (size_t k = 0; k < r_size; ++k) __builtin_prefetch(r + 64 * (word * r_size + k), 0, 2);
    for (size_t k = 0; k < c_size; ++k) __builtin_prefetch(c + 64 * (word * c_size + k), 0, 2);
  }
};

// A bit for every value inside one of the cells. n is a multiple of 64.
template <class L, size_t kCells>
inline void mark(const typename L::T* x, size_t n, const typename L::T* lo, const typename L::T* hi,
                 int64_t* at_least, uint64_t* words, const Ahead& ahead) {
  typename L::V low[kCells], high[kCells];
  typename L::Count counts[kCells];
  for (size_t k = 0; k < kCells; ++k)
    low[k] = L::spread(lo[k]), high[k] = L::spread(hi[k]), counts[k] = L::zero();
  for (size_t w = 0; w < n / 64; ++w) {
    uint64_t word = 0;
    ahead.fetch(w);
    for (size_t i = 0; i < 64; i += L::kLanes) {
      const typename L::V v = L::get(x + 64 * w + i);
      uint64_t inside = 0;
      for (size_t k = 0; k < kCells; ++k) inside |= L::within(v, low[k], high[k], counts[k]);
      word |= inside << i;
    }
    words[w] |= word;
  }
  for (size_t k = 0; k < kCells; ++k) at_least[k] += L::total(counts[k]);
}

template <class L>
inline void point(const typename L::T* x, size_t n, typename L::T value, int64_t* at_least,
                  int64_t* above) {
  const typename L::V v = L::spread(value);
  typename L::Count ge = L::zero(), gt = L::zero();
  for (size_t i = 0; i < n; i += L::kLanes) {
    const typename L::V here = L::get(x + i);
    L::within(here, v, v, ge);
    L::above(here, v, gt);
  }
  *at_least += L::total(ge);
  *above += L::total(gt);
}

template <class L, class Distance>
inline void count_in(typename L::T* x, size_t n, const Cells& cells, const typename L::T* lo,
                     const typename L::T* hi, Tally* tally, const Ahead& ahead, Distance distance) {
  size_t padded = n;
  while (padded % 64) x[padded++] = std::numeric_limits<typename L::T>::quiet_NaN();
  uint64_t words[kWords] = {};
  for (size_t k = 0; k < cells.collected;) {
    int64_t* counts = tally->at_least + k;
    switch (cells.collected - k) {
      case 1: mark<L, 1>(x, padded, lo + k, hi + k, counts, words, ahead); k += 1; break;
      case 2: mark<L, 2>(x, padded, lo + k, hi + k, counts, words, ahead); k += 2; break;
      case 3: mark<L, 3>(x, padded, lo + k, hi + k, counts, words, ahead); k += 3; break;
      default: mark<L, 4>(x, padded, lo + k, hi + k, counts, words, ahead); k += 4; break;
    }
  }
  for (size_t k = cells.collected; k < cells.count; ++k)
    point<L>(x, padded, lo[k], &tally->at_least[k], &tally->above[k]);
  if (cells.collected == 0) return;
  // Few words hold more than four hits, so the branch below is one that is hardly ever taken.
  uint16_t places[kPairBlock + 64];
  size_t found = 0;
  for (size_t w = 0; w < padded / 64; ++w) {
    uint64_t word = words[w];
    uint16_t* at = places + found;
    found += size_t(__builtin_popcountll(word));
    do {
      for (int k = 0; k < 4; ++k) {
        *at++ = uint16_t(64 * w + size_t(__builtin_ctzll(word | (1ull << 63))));
        word &= word - 1;
      }
    } while (__builtin_expect(word != 0, 0));
  }
  double* hits = tally->hits + tally->used;
  for (size_t j = 0; j < found; ++j) hits[j] = distance(places[j]);
  tally->used += found;
}

// As in numerics/histogram.py; NaN goes behind the last, and what overflows into it.
inline uint32_t bucket_of(float distance) {
  const uint32_t bits = as_bits(distance);
  if (bits < 0x7f800000u) return bits >> 19;
  return bits == 0x7f800000u ? 0x7f7fffffu >> 19 : uint32_t(kBuckets / 2);
}

// Distances rounded to float; `distance(i)` is the exact one.
template <class Distance>
inline void count_narrow(float* x, size_t n, const Cells& cells, Tally* tally, const Ahead& ahead,
                         Distance distance) {
  if (tally->table)
    for (size_t i = 0; i < n; ++i) ++tally->table[bucket_of(x[i])];
  count_in<Floats>(x, n, cells, cells.lo32, cells.hi32, tally, ahead, distance);
}

// NaN stands for what is not to be counted.
inline void count_wide(double* x, size_t n, const Cells& cells, Tally* tally,
                       const Ahead& ahead = {nullptr, nullptr, 0, 0}) {
  if (tally->table)
    for (size_t i = 0; i < n; ++i) ++tally->table[bucket_of(float(x[i]))];
  count_in<Doubles>(x, n, cells, cells.lo, cells.hi, tally, ahead, [&](size_t i) { return x[i]; });
}

}  // namespace
}  // namespace tensortap
