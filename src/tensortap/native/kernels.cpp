// The inner loops, compiled once for each instruction set (see CMakeLists.txt).
//
// Floats of 16 bits and more take a fast path, a block that fits in L1 at a time: sum and sum of
// squares in float64, everything else from few comparisons, of bit patterns as integers where those
// are narrower. A block that holds NaN, infinities or values at the format's maximum, or whose
// variance would cancel, is done again by the exact path, which handles everything.

#include "core.hpp"
#include "lanes.hpp"

namespace tensortap {
namespace {

constexpr size_t kBlock = 4096;
// A block is done again when its variance is below this share of its mean square.
constexpr double kCancels = 1e-3;

inline State empty_state() {
  State s{};
  s.min = std::numeric_limits<double>::infinity();
  s.max = -s.min;
  return s;
}

// Chan, Golub, LeVeque. Equal means stay exactly what they are.
inline void merge(State& a, const State& b) {
  a.nan += b.nan;
  a.posinf += b.posinf;
  a.neginf += b.neginf;
  a.zeros += b.zeros;
  a.subnormal += b.subnormal;
  a.saturated += b.saturated;
  if (b.finite == 0) return;
  a.min = b.min < a.min ? b.min : a.min;
  a.max = b.max > a.max ? b.max : a.max;
  if (a.finite == 0) {
    a.finite = b.finite;
    a.mean = b.mean;
    a.m2 = b.m2;
    return;
  }
  const double na = double(a.finite), nb = double(b.finite), n = na + nb;
  const double delta = b.mean - a.mean;
  a.mean += delta * (nb / n);
  a.m2 += b.m2 + delta * delta * (na * nb / n);
  a.finite += b.finite;
}

// ---- The exact path ------------------------------------------------------------------------------

template <class F>
inline State exact(const void* data, size_t n, double scale) {
  using Bits = typename F::Bits;
  using Signed = typename F::Signed;
  const auto* p = static_cast<const Loose<typename F::Store>*>(data);
  // Counters as wide as the elements keep the loop in one vector width.
  Bits nan = 0, inf = 0, posinf = 0, zeros = 0, subnormal = 0, saturated = 0;
  constexpr Signed kTop = std::numeric_limits<Signed>::max();
  // The minimum as a maximum of negated keys: GCC 12 gets the min reduction of widened 16-bit
  // elements wrong.
  Signed low = -kTop, high = -kTop;
  double sum = 0;
#pragma omp simd reduction(+ : nan, inf, posinf, zeros, subnormal, saturated, sum) \
    reduction(max : low, high)
  for (size_t i = 0; i < n; ++i) {
    const Bits b = F::widen(p[i]);
    const Bits a = b & ~F::kSign;
    const bool finite = a < F::kInf;
    nan += a > F::kInf;
    inf += a == F::kInf;
    posinf += b == F::kInf;
    zeros += a == 0;
    subnormal += Bits(a - 1) < F::kTiny - 1;
    saturated += a == F::kMax;
    // As signed integers, with the magnitude of negatives negated, floats order as they should.
    const Signed key = (b & F::kSign) ? -Signed(a) : Signed(a);
    const Signed below = finite ? -key : -kTop, above = finite ? key : -kTop;
    low = below > low ? below : low;
    high = above > high ? above : high;
    sum += double(as_float(finite ? b : Bits(0))) * scale;
  }
  State s = empty_state();
  s.nan = int64_t(nan);
  s.posinf = int64_t(posinf);
  s.neginf = int64_t(inf - posinf);
  s.zeros = int64_t(zeros);
  s.subnormal = int64_t(subnormal);
  s.saturated = int64_t(saturated);
  s.finite = int64_t(n) - s.nan - int64_t(inf);
  if (s.finite == 0) return s;
  s.min = low < 0 ? double(as_float(Bits(-low))) : -double(as_float(Bits(low)));
  s.max = high < 0 ? -double(as_float(Bits(-high))) : double(as_float(Bits(high)));
  if (s.min == s.max) {
    s.mean = s.min * scale;
    return s;
  }
  // Around any value near the mean, squares do not cancel; what is not finite is put there.
  const double shift = sum / double(s.finite);
  double rest = 0, squares = 0;
#pragma omp simd reduction(+ : rest, squares)
  for (size_t i = 0; i < n; ++i) {
    const Bits b = F::widen(p[i]);
    const bool finite = (b & ~F::kSign) < F::kInf;
    const double d = finite ? double(as_float(b)) * scale - shift : 0.0;
    rest += d;
    squares += d * d;
  }
  const double correction = rest / double(s.finite);
  s.mean = shift + correction;
  s.m2 = squares - rest * correction;
  if (s.m2 < 0) s.m2 = 0;
  return s;
}

template <class T>
inline State integers(const void* data, size_t n) {
  const auto* p = static_cast<const Loose<T>*>(data);
  constexpr T kLow = std::numeric_limits<T>::min(), kHigh = std::numeric_limits<T>::max();
  T low = kHigh, high = kLow;
  uint32_t zeros = 0, saturated = 0;
  double sum = 0;
#pragma omp simd reduction(+ : zeros, saturated, sum) reduction(min : low) reduction(max : high)
  for (size_t i = 0; i < n; ++i) {
    const T x = p[i];
    low = x < low ? x : low;
    high = x > high ? x : high;
    zeros += x == 0;
    saturated += x == kHigh || (kLow != 0 && x == kLow);
    sum += double(x);
  }
  State s = empty_state();
  s.finite = int64_t(n);
  s.zeros = zeros;
  s.saturated = saturated;
  s.min = double(low);
  s.max = double(high);
  if (low == high) {
    s.mean = s.min;
    return s;
  }
  const double shift = sum / double(n);
  double rest = 0, squares = 0;
#pragma omp simd reduction(+ : rest, squares)
  for (size_t i = 0; i < n; ++i) {
    const double d = double(p[i]) - shift;
    rest += d;
    squares += d * d;
  }
  const double correction = rest / double(n);
  s.mean = shift + correction;
  s.m2 = squares - rest * correction;
  if (s.m2 < 0) s.m2 = 0;
  return s;
}

// ---- The fast path -------------------------------------------------------------------------------

// Sums of x - shift and of its square.
template <bool kShift>
struct Sums {
  vf64 sum[2] = {}, square[2] = {};
  vf64 shift;
  explicit Sums(double s) : shift(vf64{} + s) {}

  void add(vf32h v, int lane) {
    vf64 d = to_double(v);
    if (kShift) d -= shift;
    sum[lane] += d;
    square[lane] += d * d;
  }
  void add(vf32 v) {
    vf32h half[2];
    std::memcpy(half, &v, sizeof v);
    add(half[0], 0);
    add(half[1], 1);
  }
};

struct Fast {
  bool usable;
  State state;
};

// From the sums and the extreme bit patterns to a state. `usable` is false when the block needs
// the exact path. `small` is the least of 2 * magnitude - 1, which zero wraps to the top.
template <bool kShift>
inline void finish(Fast& r, const Sums<kShift>& sums, double shift, size_t n, double least,
                   bool any_negative, bool any_positive, double most_negative,
                   double most_positive) {
  State& s = r.state;
  const double inner = s.zeros ? 0.0 : least;
  s.finite = int64_t(n);
  s.min = any_negative ? most_negative : inner;
  s.max = any_positive ? most_positive : -inner;
  s.min += 0.0;  // -0.0 becomes 0.0
  s.max += 0.0;
  if (s.min == s.max) {
    s.mean = s.min;
    return;
  }
  const double sum = horizontal(sums.sum[0]) + horizontal(sums.sum[1]);
  const double square = horizontal(sums.square[0]) + horizontal(sums.square[1]);
  const double correction = sum / double(n);
  s.mean = shift + correction;
  s.m2 = square - sum * correction;
  r.usable = s.m2 >= kCancels * square;
}

template <bool kShift>
inline Fast fast32(const void* data, size_t n, double shift) {
  const auto* p = static_cast<const Loose<float>*>(data);
  constexpr size_t kLanes = W / 4;
  vi32 high = vi32{} + std::numeric_limits<int32_t>::min();
  vu32 low = {}, least = ~vu32{};
  vi32 zeros = {};
  Sums<kShift> sums(shift);
  for (size_t i = 0; i < n; i += kLanes) {
    const vi32 b = load<vi32>(p + i);
    const vu32 t = vu32(b) + vu32(b) - 1u;
    high = vmax(high, b);
    low = vmax(low, vu32(b));
    least = vmin(least, t);
    count_equal(zeros, t, ~vu32{});
    sums.add(load<vf32h>(p + i), 0);
    sums.add(load<vf32h>(p + i + kLanes / 2), 1);
  }
  int32_t h = high[0];
  uint32_t l = low[0], t = least[0];
  int64_t z = 0;
  for (size_t k = 0; k < kLanes; ++k) {
    h = high[k] > h ? high[k] : h;
    l = low[k] > l ? low[k] : l;
    t = least[k] < t ? least[k] : t;
    z += zeros[k];
  }
  Fast r{true, empty_state()};
  const bool positive = h >= 0, negative = l >> 31;
  const uint32_t top = positive ? uint32_t(h) : 0, bottom = negative ? l & 0x7fffffffu : 0;
  if (top >= Float32::kMax || bottom >= Float32::kMax || t < 2 * Float32::kTiny - 1) {
    r.usable = false;
    return r;
  }
  r.state.zeros = z;
  finish(r, sums, shift, n, as_float((t + 1) >> 1), negative, positive, -double(as_float(bottom)),
         as_float(top));
  return r;
}

inline void widen16(vu16 v, vf32 out[2], Bfloat16) {
  const vu32 pair = vu32(v);
  out[0] = vf32(pair << 16);
  out[1] = vf32(pair & 0xffff0000u);
}

inline void widen16(vu16 v, vf32 out[2], Float16) {
#if defined(TENSORTAP_ISA_avx512)
  const __m512i bits = (__m512i)v;
  out[0] = (vf32)_mm512_cvtph_ps(_mm512_castsi512_si256(bits));
  out[1] = (vf32)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
#elif defined(TENSORTAP_ISA_avx2)
  const __m256i bits = (__m256i)v;
  out[0] = (vf32)_mm256_cvtph_ps(_mm256_castsi256_si128(bits));
  out[1] = (vf32)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
#else
  // Infinities and NaN come out wrong, but a block that holds one is done again.
  const vu32 pair = vu32(v);
  const vu32 even = pair << 16, odd = pair & 0xffff0000u;
  const vf32 grow = vf32{} + 0x1p112f;
  const vf32 a = vf32((even & 0x7fffffffu) >> 3) * grow, b = vf32((odd & 0x7fffffffu) >> 3) * grow;
  out[0] = vf32(vu32(a) | (even & 0x80000000u));
  out[1] = vf32(vu32(b) | (odd & 0x80000000u));
#endif
}

template <class F, bool kShift>
inline Fast fast16(const void* data, size_t n, double shift) {
  const auto* p = static_cast<const Loose<uint16_t>*>(data);
  constexpr size_t kLanes = W / 2;
  vi16 high = vi16{} + std::numeric_limits<int16_t>::min();
  vu16 low = {}, least = ~vu16{};
  vi16 zeros = {}, subnormal = {};
  Sums<kShift> sums(shift);
  // Half precision often holds subnormals; with bfloat16 they are rare enough for the exact path.
  constexpr bool kCountTiny = F::kTiny16 == Float16::kTiny16;
  constexpr uint16_t kTinyMark = 2 * F::kTiny16 - 1;
  const vu16 tiny = vu16{} + kTinyMark, ones = ~vu16{};
  for (size_t i = 0; i < n; i += kLanes) {
    const vu16 b = load<vu16>(p + i);
    const vu16 t = b + b + ones;
    high = vmax(high, vi16(b));
    low = vmax(low, b);
    least = vmin(least, t);
    count_equal(zeros, t, ones);
    if (kCountTiny) count_below(subnormal, t, tiny);
    vf32 half[2];
    widen16(b, half, F{});
    sums.add(half[0]);
    sums.add(half[1]);
  }
  int16_t h = high[0];
  uint16_t l = low[0], t = least[0];
  int64_t z = 0, u = 0;
  for (size_t k = 0; k < kLanes; ++k) {
    h = high[k] > h ? high[k] : h;
    l = low[k] > l ? low[k] : l;
    t = least[k] < t ? least[k] : t;
    z += zeros[k];
    u += subnormal[k];
  }
  Fast r{true, empty_state()};
  const bool positive = h >= 0, negative = l >> 15;
  const uint16_t top = positive ? uint16_t(h) : 0, bottom = negative ? l & 0x7fff : 0;
  if (top >= F::kMax16 || bottom >= F::kMax16 || (!kCountTiny && t < kTinyMark)) {
    r.usable = false;
    return r;
  }
  r.state.zeros = z;
  r.state.subnormal = u;
  finish(r, sums, shift, n, as_float(F::widen(uint16_t((uint32_t(t) + 1) >> 1))), negative, positive,
         -double(as_float(F::widen(bottom))), as_float(F::widen(top)));
  return r;
}

// NaN and infinities need no looking for: they show in the sums.
template <bool kShift>
inline Fast fast64(const void* data, size_t n, double shift) {
  const auto* p = static_cast<const Loose<double>*>(data);
  constexpr size_t kLanes = W / 8;
  const double infinity = std::numeric_limits<double>::infinity();
  vf64 low = vf64{} + infinity, negated_high = low, least = low, sum = {}, square = {};
  const vf64 center = vf64{} + shift;
  vi64 zeros = {};
  for (size_t i = 0; i < n; i += kLanes) {
    const vf64 x = load<vf64>(p + i);
    const vi64 zero = vi64(x == 0.0);
    const vi64 magnitude = vi64(x) & ~int64_t(Float64::kSign);
    low = least_of(x, low);
    negated_high = least_of(-x, negated_high);
    least = least_of(vf64(magnitude | (zero & int64_t(Float64::kInf))), least);
    zeros -= zero;
    const vf64 d = kShift ? x - center : x;
    sum += d;
    square += d * d;
  }
  Fast r{false, empty_state()};
  State& s = r.state;
  const double total = horizontal(sum), squares = horizontal(square);
  if (!(total - total == 0) || !(squares - squares == 0)) return r;
  double tiny = infinity, high = infinity;
  for (size_t k = 0; k < kLanes; ++k) {
    s.min = low[k] < s.min ? low[k] : s.min;
    high = negated_high[k] < high ? negated_high[k] : high;
    tiny = least[k] < tiny ? least[k] : tiny;
    s.zeros += zeros[k];
  }
  s.max = -high;
  const double most = std::numeric_limits<double>::max();
  if (tiny < std::numeric_limits<double>::min() || s.max == most || s.min == -most) return r;
  s.finite = int64_t(n);
  s.min += 0.0;  // -0.0 becomes 0.0
  s.max += 0.0;
  r.usable = true;
  if (s.min == s.max) {
    s.mean = s.min;
    return r;
  }
  const double correction = total / double(n);
  s.mean = shift + correction;
  s.m2 = squares - total * correction;
  r.usable = s.m2 >= kCancels * squares && squares > 0;
  return r;
}

template <bool kShift>
inline Fast fast(const void* p, size_t n, double shift, Float64) {
  return fast64<kShift>(p, n, shift);
}
template <bool kShift>
inline Fast fast(const void* p, size_t n, double shift, Float32) {
  return fast32<kShift>(p, n, shift);
}
template <bool kShift, class F>
inline Fast fast(const void* p, size_t n, double shift, F) {
  return fast16<F, kShift>(p, n, shift);
}

// ---- Histograms ----------------------------------------------------------------------------------

inline uint32_t bucket(uint32_t b) {
  return (b & 0x7fffffffu) < 0x7f800000u ? b >> 19 : uint32_t(kBuckets);
}

inline uint32_t bucket_of(double x) {
  const double limit = std::numeric_limits<float>::max();
  const double clamped = x > limit ? limit : x < -limit ? -limit : x;
  return bucket(as_bits(float(clamped)));
}

inline void tally(const uint16_t* keys, size_t n, uint32_t* table) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const uint64_t four = load<uint64_t>(keys + i);
    ++table[four & 0xffff];
    ++table[kTableStride + ((four >> 16) & 0xffff)];
    ++table[2 * kTableStride + ((four >> 32) & 0xffff)];
    ++table[3 * kTableStride + (four >> 48)];
  }
  for (; i < n; ++i) ++table[keys[i]];
}

template <class F>
inline void bucket_floats(const void* data, size_t n, uint16_t* keys) {
  const auto* p = static_cast<const Loose<typename F::Store>*>(data);
#pragma omp simd
  for (size_t i = 0; i < n; ++i) keys[i] = uint16_t(bucket(F::widen(p[i])));
}

template <>
inline void bucket_floats<Float64>(const void* data, size_t n, uint16_t* keys) {
  const auto* p = static_cast<const Loose<uint64_t>*>(data);
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const bool finite = (p[i] & ~Float64::kSign) < Float64::kInf;
    keys[i] = uint16_t(finite ? bucket_of(as_float(p[i])) : uint32_t(kBuckets));
  }
}

template <class T>
inline void bucket_integers(const void* data, size_t n, uint16_t* keys) {
  const auto* p = static_cast<const Loose<T>*>(data);
#pragma omp simd
  for (size_t i = 0; i < n; ++i) keys[i] = uint16_t(bucket(as_bits(float(double(p[i])))));
}

// ---- Chunks --------------------------------------------------------------------------------------

// Eight bytes at a time, since extracting lanes of a vector one by one takes longer.
inline void tally_bits(const Loose<uint32_t>* p, size_t n, uint32_t* table) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const uint64_t a = load<uint64_t>(p + i), b = load<uint64_t>(p + i + 2);
    ++table[(a >> 19) & 0x1fff];
    ++table[kTableStride + (a >> 51)];
    ++table[2 * kTableStride + ((b >> 19) & 0x1fff)];
    ++table[3 * kTableStride + (b >> 51)];
  }
  for (; i < n; ++i) ++table[p[i] >> 19];
}

inline void tally_bits(const Loose<uint16_t>* p, size_t n, uint32_t* table) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const uint64_t four = load<uint64_t>(p + i);
    ++table[(four >> 3) & 0x1fff];
    ++table[kTableStride + ((four >> 19) & 0x1fff)];
    ++table[2 * kTableStride + ((four >> 35) & 0x1fff)];
    ++table[3 * kTableStride + (four >> 51)];
  }
  for (; i < n; ++i) ++table[p[i] >> 3];
}

inline void tally_bits(const Loose<uint64_t>*, size_t, uint32_t*) {}

// Count a block. For formats with the exponent of float32, where all values are finite, the top 13
// bits as they are stored are the bucket.
template <class F>
inline void tally_block(const Loose<typename F::Store>* p, size_t n, bool finite, uint32_t* table) {
  if (F::kTopBits && finite) return tally_bits(p, n, table);
  alignas(64) uint16_t keys[kBlock];
  bucket_floats<F>(p, n, keys);
  tally(keys, n, table);
}

template <class F>
State fast_chunk(const void* data, size_t n, uint32_t* table, double scale = 1.0) {
  const auto* p = static_cast<const Loose<typename F::Store>*>(data);
  constexpr size_t kLanes = W / sizeof(typename F::Store);
  State total = empty_state();
  bool shifted = false;  // once a block's mean dwarfs its spread, so do most of its neighbours'
  double shift = 0;
  for (size_t at = 0; at < n; at += kBlock) {
    const size_t size = n - at < kBlock ? n - at : kBlock;
    const size_t whole = scale == 1.0 ? size / kLanes * kLanes : 0;
    const int64_t before = total.finite;
    if (whole) {
      Fast r = shifted ? fast<true>(p + at, whole, shift, F{}) : fast<false>(p + at, whole, 0, F{});
      if (!r.usable) {
        r.state = exact<F>(p + at, whole, 1.0);
        const double mean = r.state.mean, n_finite = double(r.state.finite);
        shifted = r.state.m2 < kCancels * (r.state.m2 + n_finite * mean * mean);
      }
      shift = r.state.mean;
      merge(total, r.state);
    }
    if (whole < size) merge(total, exact<F>(p + at + whole, size - whole, scale));
    if (table) tally_block<F>(p + at, size, total.finite - before == int64_t(size), table);
  }
  return total;
}

template <class T>
State integer_chunk(const void* data, size_t n, uint32_t* table) {
  const auto* p = static_cast<const Loose<T>*>(data);
  alignas(64) uint16_t keys[kBlock];
  State total = empty_state();
  for (size_t at = 0; at < n; at += kBlock) {
    const size_t size = n - at < kBlock ? n - at : kBlock;
    merge(total, integers<T>(p + at, size));
    if (table) {
      bucket_integers<T>(p + at, size, keys);
      tally(keys, size, table);
    }
  }
  return total;
}

State chunk(const void* data, size_t n, int dtype, double scale, uint32_t* table) {
  const KeepSubnormals guard;
  (void)guard;
  switch (dtype) {
    case kFloat32: return fast_chunk<Float32>(data, n, table);
    case kFloat16: return fast_chunk<Float16>(data, n, table);
    case kBfloat16: return fast_chunk<Bfloat16>(data, n, table);
    case kFloat64: return fast_chunk<Float64>(data, n, table, scale);
    case kInt16: return integer_chunk<int16_t>(data, n, table);
    case kUint16: return integer_chunk<uint16_t>(data, n, table);
    case kInt32: return integer_chunk<int32_t>(data, n, table);
    case kUint32: return integer_chunk<uint32_t>(data, n, table);
    case kInt64: return integer_chunk<int64_t>(data, n, table);
    case kUint64: return integer_chunk<uint64_t>(data, n, table);
    default: return empty_state();
  }
}

void count_bytes(const void* data, size_t nbytes, int64_t* counts) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t table[4][256] = {};
  size_t i = 0;
  for (; i + 8 <= nbytes; i += 8) {
    const uint64_t eight = load<uint64_t>(p + i);
    for (int k = 0; k < 8; ++k) ++table[k & 3][(eight >> (8 * k)) & 0xff];
  }
  for (; i < nbytes; ++i) ++table[0][p[i]];
  for (int v = 0; v < 256; ++v)
    counts[v] += int64_t(table[0][v]) + table[1][v] + table[2][v] + table[3][v];
}

uint64_t read(const void* data, size_t nbytes) {
  const auto* p = static_cast<const char*>(data);
  vu64 lanes[4] = {};
  size_t i = 0;
  for (; i + 4 * W <= nbytes; i += 4 * W)
    for (size_t k = 0; k < 4; ++k) lanes[k] |= load<vu64>(p + i + k * W);
  const vu64 all = (lanes[0] | lanes[1]) | (lanes[2] | lanes[3]);
  uint64_t result = 0;
  for (size_t k = 0; k < W / 8; ++k) result |= all[k];
  for (; i < nbytes; ++i) result |= uint64_t(static_cast<unsigned char>(p[i]));
  return result;
}

#define TENSORTAP_TEXT_(x) #x
#define TENSORTAP_TEXT(x) TENSORTAP_TEXT_(x)
#define TENSORTAP_JOIN_(a, b) a##b
#define TENSORTAP_JOIN(a, b) TENSORTAP_JOIN_(a, b)

}  // namespace

extern const Kernels TENSORTAP_JOIN(kernels_, TENSORTAP_ISA);
const Kernels TENSORTAP_JOIN(kernels_, TENSORTAP_ISA) = {TENSORTAP_TEXT(TENSORTAP_ISA), chunk,
                                                         count_bytes, read};

}  // namespace tensortap
