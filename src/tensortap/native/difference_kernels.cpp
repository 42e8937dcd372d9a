// The inner loops of a difference, compiled once for each instruction set (see CMakeLists.txt).
//
// A block that fits in L1 at a time. The fast path takes plain sums in float64, all at once; what is
// not finite shows in them. A block where that happens, or where a variance would cancel, is done
// again by the exact path, which handles everything. Candidate sums follow from those of the
// reference and of d, unless they would cancel. Distances |d| are kept for the block, so that the
// cells of the percentiles are counted apart, from L1.

#include "cell_kernels.hpp"
#include "difference_lanes.hpp"

namespace tensortap {
namespace {

// A block is done again when a variance is below this share of its mean square, ...
constexpr double kCancels = 1e-3;
// ... or the candidate's below this share of what it is computed from.
constexpr double kCandidateCancels = 1e-4;

// a + b in two numbers: the sum, and what rounding took from it.
inline void add(double a, double b, double& sum, double& low) {
  sum = a + b;
  const double part = sum - a;
  low = (a - (sum - part)) + (b - part);
}

// Chan, Golub, LeVeque. Equal means stay exactly what they are.
inline void merge(PairState& a, const PairState& b) {
  a.agreeing += b.agreeing;
  a.disagreeing += b.disagreeing;
  a.mismatched += b.mismatched;
  a.differs |= b.differs;
  a.r_top = b.r_top > a.r_top ? b.r_top : a.r_top;
  a.c_top = b.c_top > a.c_top ? b.c_top : a.c_top;
  if (b.finite == 0) return;
  const double na = double(a.finite), nb = double(b.finite), n = na + nb;
  const double share = nb / n, both = na * share;
  const double r = (b.r_mean - a.r_mean) + (b.r_low - a.r_low);
  const double c = (b.c_mean - a.c_mean) + (b.c_low - a.c_low);
  const double d = (b.d_mean - a.d_mean) + (b.d_low - a.d_low);
  if (a.finite == 0) {
    a.r_mean = b.r_mean, a.c_mean = b.c_mean, a.d_mean = b.d_mean;
    a.r_low = b.r_low, a.c_low = b.c_low, a.d_low = b.d_low;
  } else {
    add(a.r_mean, a.r_low + r * share, a.r_mean, a.r_low);
    add(a.c_mean, a.c_low + c * share, a.c_mean, a.c_low);
    add(a.d_mean, a.d_low + d * share, a.d_mean, a.d_low);
  }
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
  a.relative_top = b.relative_top > a.relative_top ? b.relative_top : a.relative_top;
  a.finite += b.finite;
}

// ---- The exact path ------------------------------------------------------------------------------

// Everything about a block whose elements are at hand as doubles; |d| goes to `kept`.
inline PairState exact(const Pair& pair, const Wide& wide, size_t n, double* kept) {
  const Loose<double>*r = wide.r, *c = wide.c;
  const double* d = wide.d;
  PairState s{};
  const double rs = pair.r_scale, cs = pair.c_scale, ds = pair.d_scale, qs = pair.relative_scale;
  int64_t finite = 0, agreeing = 0, mismatched = 0;
  double r_sum = 0, c_sum = 0, d_sum = 0, r_abs = 0, d_abs = 0, relative = 0, relative_top = 0;
  double r_top = 0, c_top = 0, rd_sum = 0, rc_sum = 0;
#pragma omp simd reduction(+ : finite, agreeing, mismatched, r_sum, c_sum, d_sum, r_abs, d_abs, \
                               relative, rd_sum, rc_sum) \
    reduction(max : relative_top, r_top, c_top)
  for (size_t i = 0; i < n; ++i) {
    const double x = r[i], y = c[i];
    const bool ok = __builtin_fabs(x) < kInfinity && __builtin_fabs(y) < kInfinity;
    const double size = ok ? __builtin_fabs(x) : 0.0, other = ok ? __builtin_fabs(y) : 0.0;
    const double distance = ok ? __builtin_fabs(d[i]) : 0.0;
    const bool over = distance == kInfinity;
    const double step = over ? y * ds - x * ds : d[i] * ds;
    finite += ok;
    agreeing += !ok && (x == y || (x != x && y != y));
    mismatched += ok && distance > pair.atol + pair.rtol * size;
    r_sum += ok ? x * rs : 0.0;
    c_sum += ok ? y * cs : 0.0;
    d_sum += ok ? step : 0.0;
    rd_sum += ok ? x * rs * step : 0.0;
    rc_sum += ok ? x * rs * (y * cs) : 0.0;
    r_abs += size * rs;
    d_abs += ok ? __builtin_fabs(step) : 0.0;
    const double ratio = distance / (size + kEpsilon);
    relative += ratio * qs;
    relative_top = ratio > relative_top ? ratio : relative_top;
    r_top = size > r_top ? size : r_top;
    c_top = other > c_top ? other : c_top;
    kept[i] = ok ? distance : kNan;
  }
  s.finite = finite;
  s.agreeing = agreeing;
  s.disagreeing = int64_t(n) - finite - agreeing;
  s.mismatched = mismatched + s.disagreeing;
  if (!finite) return s;
  s.r_abs = r_abs, s.d_abs = d_abs, s.relative = relative, s.relative_top = relative_top;
  s.r_top = r_top, s.c_top = c_top, s.rd_sum = rd_sum, s.rc_sum = rc_sum;
  // Constants are told from what rounding leaves of them.
  size_t first = 0;
  while (kept[first] != kept[first]) ++first;
  const double r0 = r[first], c0 = c[first], d0 = d[first];
  const double total = double(finite), rm = r_sum / total, cm = c_sum / total, dm = d_sum / total;
  uint64_t r_varies = 0, c_varies = 0, d_varies = 0;
  double r_rest = 0, c_rest = 0, d_rest = 0, rr = 0, cc = 0, dd = 0, rd = 0, rc = 0;
#pragma omp simd reduction(| : r_varies, c_varies, d_varies) \
    reduction(+ : r_rest, c_rest, d_rest, rr, cc, dd, rd, rc)
  for (size_t i = 0; i < n; ++i) {
    const bool ok = kept[i] == kept[i], over = kept[i] == kInfinity;
    const double step = over ? c[i] * ds - r[i] * ds : d[i] * ds;
    const double x = ok ? r[i] * rs - rm : 0.0, y = ok ? c[i] * cs - cm : 0.0;
    const double z = ok ? step - dm : 0.0;
    r_varies |= uint64_t(ok && r[i] != r0);
    c_varies |= uint64_t(ok && c[i] != c0);
    d_varies |= uint64_t(ok && d[i] != d0);
    r_rest += x, c_rest += y, d_rest += z;
    rr += x * x, cc += y * y, dd += z * z;
    rd += x * z, rc += x * y;
  }
  r_rest /= total, c_rest /= total, d_rest /= total;
  const auto spread = [&](double squares, double rest, bool varies) {
    const double m2 = squares - total * rest * rest;
    return varies && m2 > 0 ? m2 : 0.0;
  };
  add(r_varies ? rm : r0 * rs, r_varies ? r_rest : 0.0, s.r_mean, s.r_low);
  add(c_varies ? cm : c0 * cs, c_varies ? c_rest : 0.0, s.c_mean, s.c_low);
  const bool d_moves = d_varies || d0 - d0 != 0;
  add(d_moves ? dm : d0 * ds, d_moves ? d_rest : 0.0, s.d_mean, s.d_low);
  s.r_m2 = spread(rr, r_rest, r_varies);
  s.c_m2 = spread(cc, c_rest, c_varies);
  s.d_m2 = spread(dd, d_rest, d_moves);
  if (s.r_m2 > 0 && s.d_m2 > 0) s.rd = rd - total * r_rest * d_rest;
  if (s.r_m2 > 0 && s.c_m2 > 0) s.rc = rc - total * r_rest * c_rest;
  return s;
}

// ---- The fast path -------------------------------------------------------------------------------

struct Shift {
  bool on;
  double r, d;
};

// Sums over a block, with all lanes added up.
template <bool kShift>
struct Sums {
  vf64 r = {}, d = {}, rr = {}, dd = {}, rd = {}, r_abs = {}, d_abs = {}, relative = {};
  vf64 relative_top = {}, d_top = {};
  vi64 mismatched = {};
  vf64 r_shift, d_shift, rtol, atol, epsilon;

  Sums(const Pair& pair, const Shift& shift)
      : r_shift(vf64{} + shift.r), d_shift(vf64{} + shift.d), rtol(vf64{} + pair.rtol),
        atol(vf64{} + pair.atol), epsilon(vf64{} + kEpsilon) {}

  vf64 add(vf64 x, vf64 step) {
    const vf64 size = absolute(x), distance = absolute(step);
    const vf64 x0 = kShift ? x - r_shift : x, d0 = kShift ? step - d_shift : step;
    r += x0;
    d += d0;
    rr = fused(x0, x0, rr);
    dd = fused(d0, d0, dd);
    rd = fused(x0, d0, rd);
    r_abs += size;
    d_abs += distance;
    const vf64 ratio = quotient(distance, size + epsilon);
    relative += ratio;
    relative_top = greatest_of(ratio, relative_top);
    d_top = greatest_of(distance, d_top);
    count_greater(mismatched, distance, atol + rtol * size);
    return distance;
  }
};

struct Fast {
  bool usable;
  PairState state;
  double d_top;
};

template <bool kShift>
inline Fast finish(const Sums<kShift>& sums, const Shift& shift, size_t n) {
  Fast f{false, PairState{}, largest_lane(sums.d_top)};
  PairState& s = f.state;
  s.r_abs = horizontal(sums.r_abs);
  s.d_abs = horizontal(sums.d_abs);
  s.relative = horizontal(sums.relative);
  const double r = horizontal(sums.r), d = horizontal(sums.d), rr = horizontal(sums.rr);
  const double dd = horizontal(sums.dd), rd = horizontal(sums.rd), total = double(n);
  const double all = s.r_abs + s.d_abs + s.relative + rr + dd;
  if (!(all - all == 0)) return f;
  const double r_rest = r / total, d_rest = d / total;
  s.finite = int64_t(n);
  for (size_t k = 0; k < W / 8; ++k) s.mismatched += sums.mismatched[k];
  s.relative_top = largest_lane(sums.relative_top);
  add(kShift ? shift.r : 0.0, r_rest, s.r_mean, s.r_low);
  add(kShift ? shift.d : 0.0, d_rest, s.d_mean, s.d_low);
  add(s.r_mean, s.d_mean, s.c_mean, s.c_low);
  s.c_low += s.r_low + s.d_low;
  s.r_m2 = rr - r * r_rest;
  s.d_m2 = dd - d * d_rest;
  s.rd = rd - r * d_rest;
  s.rc = s.r_m2 + s.rd;
  s.c_m2 = s.rc + s.rd + s.d_m2;
  s.rd_sum = kShift ? s.rd + total * s.r_mean * s.d_mean : rd;
  s.rc_sum = kShift ? s.rc + total * s.r_mean * s.c_mean : rr + rd;
  const double spread = s.r_m2 + s.d_m2, c_length = s.c_m2 + total * s.c_mean * s.c_mean;
  const double length = spread + total * (s.r_mean * s.r_mean + s.d_mean * s.d_mean);
  // What stands for the candidate is a sum of larger numbers. Did enough remain?
  const auto remains = [](double sum, double terms) {
    return __builtin_fabs(sum) >= kCandidateCancels * terms;
  };
  f.usable = remains(s.c_m2, spread) && remains(c_length, length) && remains(s.rc, s.r_m2) &&
             (kShift || remains(s.rc_sum, rr));
  f.usable = f.usable && s.r_m2 >= kCancels * rr && s.d_m2 >= kCancels * dd && s.c_m2 >= 0;
  return f;
}

inline void halves(vf32 v, vf64 out[2]) {
  vf32h half[2];
  std::memcpy(half, &v, sizeof v);
  out[0] = to_double(half[0]);
  out[1] = to_double(half[1]);
}

enum Keep { kNothing, kDistances, kChecked };

// Formats that float32 holds. `kept` gets |d| rounded to it; kChecked tells whether that was exact.
template <class R, class C, bool kShift, Keep kKeep>
inline Fast fast32(const Pair& pair, const char* rp, const char* cp, size_t n, const Shift& shift,
                   float* kept, bool* rounded) {
  Sums<kShift> sums(pair, shift);
  vi64 changed = {};
  for (size_t i = 0; i < n; i += W / 4) {
    const vf32 x = floats(rp + i * sizeof(typename R::Store), R{});
    const vf32 y = floats(cp + i * sizeof(typename C::Store), C{});
    vf64 x2[2], y2[2];
    halves(x, x2);
    halves(y, y2);
    const vf64 d0 = y2[0] - x2[0], d1 = y2[1] - x2[1];
    sums.add(x2[0], d0);
    sums.add(x2[1], d1);
    if (kKeep != kNothing) {
      // While cells are counted nothing is read, so the next block must be on its way by then.
      __builtin_prefetch(rp + (i + kPairBlock) * sizeof(typename R::Store), 0, 2);
      __builtin_prefetch(cp + (i + kPairBlock) * sizeof(typename C::Store), 0, 2);
      const vf32 d = y - x, distance = absolute(d);
      std::memcpy(kept + i, &distance, sizeof distance);
      if (kKeep == kChecked) {
        vf64 back[2];
        halves(d, back);
        changed |= (vi64(back[0]) ^ vi64(d0)) | (vi64(back[1]) ^ vi64(d1));
      }
    }
  }
  if (kKeep == kChecked) {
    int64_t any = 0;
    for (size_t k = 0; k < W / 8; ++k) any |= changed[k];
    *rounded = any != 0;
  }
  return finish(sums, shift, n);
}

// Anything else, as doubles; their range is watched.
template <bool kShift, bool kKeep>
inline Fast fast64(const Pair& pair, const Loose<double>* rp, const Loose<double>* cp, size_t n,
                   const Shift& shift, double* kept) {
  Sums<kShift> sums(pair, shift);
  vf64 r_top = {}, c_top = {};
  for (size_t i = 0; i < n; i += W / 8) {
    const vf64 x = load<vf64>(rp + i), y = load<vf64>(cp + i);
    r_top = greatest_of(absolute(x), r_top);
    c_top = greatest_of(absolute(y), c_top);
    const vf64 distance = sums.add(x, y - x);
    if (kKeep) std::memcpy(kept + i, &distance, sizeof distance);
  }
  Fast f = finish(sums, shift, n);
  f.state.r_top = largest_lane(r_top);
  f.state.c_top = largest_lane(c_top);
  return f;
}

// ---- Chunks --------------------------------------------------------------------------------------

struct Job {
  const Pair& pair;
  const Cells* cells;
  PairState& total;
  Largest& largest;
  Tally* tally;
  Shift shift{false, 0, 0};  // once a block's mean dwarfs its spread, so do most of its neighbours'

  bool same_bytes(size_t start, size_t n) const {
    const size_t size = bytes_of(pair.r_dtype);
    return pair.r_dtype == pair.c_dtype &&
           std::memcmp(pair.r + start * size, pair.c + start * size, n * size) == 0;
  }
  Ahead ahead(size_t start, size_t n) const {
    const size_t r_size = bytes_of(pair.r_dtype), c_size = bytes_of(pair.c_dtype);
    return {pair.r + (start + n) * r_size, pair.c + (start + n) * c_size, r_size, c_size};
  }
  void take(const PairState& s, size_t start, size_t n) {
    // Most differ by a number; only where none does are the bytes looked at.
    if (!total.differs) total.differs = s.d_abs > 0 || s.disagreeing || !same_bytes(start, n);
    merge(total, s);
  }
  void follow(const PairState& s) {
    if (!s.finite) return;
    const auto cancels = [&](double mean, double m2) {
      return m2 < kCancels * (m2 + double(s.finite) * mean * mean);
    };
    shift = {cancels(s.r_mean, s.r_m2) || cancels(s.d_mean, s.d_m2), s.r_mean, s.d_mean};
  }
};

// The exact path for n <= kPairBlock pairs that `wide` already holds.
inline void exact_block(Job& job, Wide& wide, size_t start, size_t n) {
  alignas(64) double kept[kPairBlock + kPadding];
  wide.subtract(job.pair, start, n);
  const PairState s = exact(job.pair, wide, n, kept);
  if (s.finite) {
    size_t at = n;
    double top = job.largest.value;
    for (size_t i = 0; i < n; ++i)
      if (kept[i] > top) top = kept[i], at = i;
    if (at < n) job.largest = {top, int64_t(start + at), wide.r[at], wide.c[at]};
  }
  job.take(s, start, n);
  job.follow(s);
  if (job.cells) count_wide(kept, n, *job.cells, job.tally);
}

template <class R, class C>
inline Fast fast32_as(const Job& job, const char* rp, const char* cp, size_t n, Keep keep, float* kept,
                      bool* rounded) {
  const Pair& pair = job.pair;
  const Shift& s = job.shift;
  if (s.on) {
    if (keep == kNothing) return fast32<R, C, true, kNothing>(pair, rp, cp, n, s, kept, rounded);
    return fast32<R, C, true, kChecked>(pair, rp, cp, n, s, kept, rounded);
  }
  if (keep == kNothing) return fast32<R, C, false, kNothing>(pair, rp, cp, n, s, kept, rounded);
  if (keep == kDistances) return fast32<R, C, false, kDistances>(pair, rp, cp, n, s, kept, rounded);
  return fast32<R, C, false, kChecked>(pair, rp, cp, n, s, kept, rounded);
}

template <class R, class C>
void narrow_chunk(Job& job, size_t first, size_t count) {
  const Pair& pair = job.pair;
  const bool narrow = job.cells && job.cells->narrow, checked = narrow && job.cells->checked;
  const Keep keep = !narrow ? kNothing : checked ? kChecked : kDistances;
  alignas(64) float kept[kPairBlock + kPadding];
  Wide wide;
  for (size_t at = 0; at < count; at += kPairBlock) {
    const size_t start = first + at, size = count - at < kPairBlock ? count - at : kPairBlock;
    const size_t whole = size / (W / 4) * (W / 4);
    const char* rp = pair.r + start * sizeof(typename R::Store);
    const char* cp = pair.c + start * sizeof(typename C::Store);
    const auto distance = [&](size_t i) {
      return __builtin_fabs(element<C>(cp, i) - element<R>(rp, i));
    };
    if (whole) {
      bool rounded = false;
      Fast f = fast32_as<R, C>(job, rp, cp, whole, keep, kept, &rounded);
      if (!f.usable) {
        wide.fill(pair, start, whole);
        exact_block(job, wide, start, whole);
      } else {
        job.take(f.state, start, whole);
        job.shift.r = f.state.r_mean, job.shift.d = f.state.d_mean;
        if (f.d_top > job.largest.value) {
          size_t i = 0;
          while (distance(i) != f.d_top) ++i;
          job.largest = {f.d_top, int64_t(start + i), element<R>(rp, i), element<C>(cp, i)};
        }
        if (narrow && !(checked && rounded)) {
          count_narrow(kept, whole, *job.cells, job.tally, job.ahead(start, whole), distance);
        } else if (job.cells) {
          alignas(64) double exactly[kPairBlock + kPadding];
          for (size_t i = 0; i < whole; ++i) exactly[i] = distance(i);
          count_wide(exactly, whole, *job.cells, job.tally, job.ahead(start, whole));
        }
      }
    }
    if (whole < size) {
      wide.fill(pair, start + whole, size - whole);
      exact_block(job, wide, start + whole, size - whole);
    }
  }
}

void wide_chunk(Job& job, size_t first, size_t count) {
  const Pair& pair = job.pair;
  const bool scaled = pair.r_scale != 1 || pair.c_scale != 1 || pair.d_scale != 1 ||
                      pair.relative_scale != 1;
  const bool long_integers = has_long_integers(pair);
  alignas(64) double kept[kPairBlock + kPadding];
  Wide wide;
  for (size_t at = 0; at < count; at += kPairBlock) {
    const size_t start = first + at, size = count - at < kPairBlock ? count - at : kPairBlock;
    const size_t whole = scaled ? 0 : size / (W / 8) * (W / 8);
    if (whole) {
      wide.fill(pair, start, whole);
      Fast f;
      if (job.cells)
        f = job.shift.on ? fast64<true, true>(pair, wide.r, wide.c, whole, job.shift, kept)
                         : fast64<false, true>(pair, wide.r, wide.c, whole, job.shift, kept);
      else
        f = job.shift.on ? fast64<true, false>(pair, wide.r, wide.c, whole, job.shift, kept)
                         : fast64<false, false>(pair, wide.r, wide.c, whole, job.shift, kept);
      if (long_integers && (f.state.r_top >= kExactIntegers || f.state.c_top >= kExactIntegers))
        f.usable = false;
      if (!f.usable) {
        exact_block(job, wide, start, whole);
      } else {
        job.take(f.state, start, whole);
        job.shift.r = f.state.r_mean, job.shift.d = f.state.d_mean;
        if (f.d_top > job.largest.value) {
          size_t i = 0;
          while (__builtin_fabs(wide.c[i] - wide.r[i]) != f.d_top) ++i;
          job.largest = {f.d_top, int64_t(start + i), wide.r[i], wide.c[i]};
        }
        if (job.cells) count_wide(kept, whole, *job.cells, job.tally, job.ahead(start, whole));
      }
    }
    if (whole < size) {
      wide.fill(pair, start + whole, size - whole);
      exact_block(job, wide, start + whole, size - whole);
    }
  }
}

void chunk(const Pair& pair, size_t start, size_t n, const Cells* cells, PairState* state,
           Largest* largest, Tally* tally) {
  const KeepSubnormals guard;
  (void)guard;
  *state = PairState{};
  Job job{pair, cells, *state, *largest, tally};
  switch (pair.r_dtype * kDtypes + pair.c_dtype) {
    case kFloat32 * kDtypes + kFloat32: return narrow_chunk<Float32, Float32>(job, start, n);
    case kFloat32 * kDtypes + kBfloat16: return narrow_chunk<Float32, Bfloat16>(job, start, n);
    case kFloat32 * kDtypes + kFloat16: return narrow_chunk<Float32, Float16>(job, start, n);
    case kBfloat16 * kDtypes + kFloat32: return narrow_chunk<Bfloat16, Float32>(job, start, n);
    case kBfloat16 * kDtypes + kBfloat16: return narrow_chunk<Bfloat16, Bfloat16>(job, start, n);
    case kBfloat16 * kDtypes + kFloat16: return narrow_chunk<Bfloat16, Float16>(job, start, n);
    case kFloat16 * kDtypes + kFloat32: return narrow_chunk<Float16, Float32>(job, start, n);
    case kFloat16 * kDtypes + kBfloat16: return narrow_chunk<Float16, Bfloat16>(job, start, n);
    case kFloat16 * kDtypes + kFloat16: return narrow_chunk<Float16, Float16>(job, start, n);
    default: return wide_chunk(job, start, n);
  }
}

void distances(const Pair& pair, size_t start, size_t n, double* out) {
  const KeepSubnormals guard;
  (void)guard;
  Wide wide;
  for (size_t at = 0; at < n; at += kPairBlock) {
    const size_t size = n - at < kPairBlock ? n - at : kPairBlock;
    wide.fill(pair, start + at, size);
    wide.subtract(pair, start + at, size);
    for (size_t i = 0; i < size; ++i) {
      const bool ok = __builtin_fabs(wide.r[i]) < kInfinity && __builtin_fabs(wide.c[i]) < kInfinity;
      out[at + i] = ok ? __builtin_fabs(wide.d[i]) : kNan;
    }
  }
}

void count(double* distances, size_t n, const Cells& cells, Tally* tally) {
  count_wide(distances, n, cells, tally);
}

// ---- Profiles ------------------------------------------------------------------------------------

// Narrow bands of columns, so that what is kept for each of them stays in L1.
void profile(const Pair& pair, size_t width, size_t first, size_t rows, size_t left, size_t right,
             double* tokens, double* channels) {
  const KeepSubnormals guard;
  (void)guard;
  constexpr size_t kBand = 512;
  alignas(64) double dd[kBand], rr[kBand], top[kBand], bad[kBand];
  Wide wide;
  for (size_t band = left; band < right; band += kBand) {
    const size_t size = right - band < kBand ? right - band : kBand;
    for (size_t k = 0; k < size; ++k) dd[k] = rr[k] = top[k] = bad[k] = 0;
    for (size_t row = 0; row < rows; ++row) {
      const size_t start = (first + row) * width + band;
      wide.fill(pair, start, size);
      wide.subtract(pair, start, size);
      const Loose<double>*r = wide.r, *c = wide.c;
      const double* d = wide.d;
      double d_sum = 0, r_sum = 0, most = 0, wrong = 0;
#pragma omp simd reduction(+ : d_sum, r_sum, wrong) reduction(max : most)
      for (size_t k = 0; k < size; ++k) {
        const double x = r[k], y = c[k];
        const bool ok = __builtin_fabs(x) < kInfinity && __builtin_fabs(y) < kInfinity;
        const bool same = x == y || (x != x && y != y);
        const double distance = ok ? __builtin_fabs(d[k]) : 0.0, value = ok ? x : 0.0;
        const double flag = ok || same ? 0.0 : 1.0, square = value * value;
        const double error = distance * distance;
        dd[k] += error;
        rr[k] += square;
        top[k] = distance > top[k] ? distance : top[k];
        bad[k] += flag;
        d_sum += error;
        r_sum += square;
        most = distance > most ? distance : most;
        wrong += flag;
      }
      double* token = tokens + 4 * row;
      token[0] += d_sum;
      token[1] += r_sum;
      token[2] = most > token[2] ? most : token[2];
      token[3] += wrong;
    }
    for (size_t k = 0; k < size; ++k) {
      double* channel = channels + 4 * (band - left + k);
      channel[0] += dd[k];
      channel[1] += rr[k];
      channel[2] = top[k] > channel[2] ? top[k] : channel[2];
      channel[3] += bad[k];
    }
  }
}

#define TENSORTAP_JOIN_(a, b) a##b
#define TENSORTAP_JOIN(a, b) TENSORTAP_JOIN_(a, b)

}  // namespace

extern const PairKernels TENSORTAP_JOIN(pair_kernels_, TENSORTAP_ISA);
const PairKernels TENSORTAP_JOIN(pair_kernels_, TENSORTAP_ISA) = {chunk, distances, count, profile};

}  // namespace tensortap
