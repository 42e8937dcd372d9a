// Copies, and digests taken on the way.
//
// The digest has eight lanes of 64 bits, in four pairs. A step multiplies two words, each mixed with
// its lane, and keeps all 128 bits of the product: a change spreads by an amount that depends on the
// data around it, and nothing is thrown away. Pieces of fixed size are digested apart and combined
// in order: the result knows nothing of threads. It is meant to tell contents apart, not to
// withstand an attacker.

#include "core.hpp"

#include <cstring>
#include <memory>

namespace tensortap {
namespace {

using std::size_t;
using std::uint64_t;

constexpr size_t kPiece = size_t(128) << 10;
constexpr size_t kParallel = size_t(256) << 10;
constexpr uint64_t kKeys[8] = {0x9e3779b97f4a7c15ull, 0xbf58476d1ce4e5b9ull, 0x94d049bb133111ebull,
                               0xd6e8feb86659fd93ull, 0xa0761d6478bd642full, 0xe7037ed1a0b428dbull,
                               0x8ebc6af09c88c6e3ull, 0x589965cc75374cc3ull};

inline Digest multiply(uint64_t a, uint64_t b) {
#ifdef __SIZEOF_INT128__
  const auto product = static_cast<unsigned __int128>(a) * b;
  return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
#else
  const uint64_t al = a & 0xffffffffu, ah = a >> 32, bl = b & 0xffffffffu, bh = b >> 32;
  const uint64_t ll = al * bl, lh = al * bh, hl = ah * bl, hh = ah * bh;
  const uint64_t middle = (ll >> 32) + (lh & 0xffffffffu) + (hl & 0xffffffffu);
  return {a * b, hh + (lh >> 32) + (hl >> 32) + (middle >> 32)};
#endif
}

inline uint64_t fold(uint64_t a, uint64_t b) {
  const Digest product = multiply(a, b);
  return product.low ^ product.high;
}

// Word by word: a local array would go to the stack and be waited for.
inline uint64_t load(const char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, 8);
  return word;
}

struct Lanes {
  uint64_t a[4], b[4];

  explicit Lanes(uint64_t seed) {
    for (int k = 0; k < 4; ++k) {
      a[k] = seed ^ kKeys[k];
      b[k] = seed ^ kKeys[k + 4];
    }
  }
  void step(const char* bytes) {
    for (int k = 0; k < 4; ++k) {
      const Digest product = multiply(load(bytes + 16 * k) ^ a[k], load(bytes + 16 * k + 8) ^ b[k]);
      const uint64_t before = a[k];
      a[k] = product.low + b[k];
      b[k] = product.high ^ before;
    }
  }
  Digest finish() const {
    Digest d{kKeys[1], kKeys[2]};
    for (int k = 0; k < 4; ++k) {
      d.low = fold(d.low ^ a[k], kKeys[3] ^ b[k]) + a[k];
      d.high = fold(d.high ^ b[k], kKeys[5] ^ a[k]) + b[k];
    }
    return d;
  }
};

template <bool kCopy>
Digest digest_piece(char* dst, const char* src, size_t nbytes, uint64_t seed) {
  Lanes lanes(seed);
  size_t i = 0;
  for (; i + 64 <= nbytes; i += 64) {
    if (kCopy) std::memcpy(dst + i, src + i, 64);
    lanes.step(src + i);
  }
  if (i < nbytes) {
    char last[64] = {};
    std::memcpy(last, src + i, nbytes - i);
    if (kCopy) std::memcpy(dst + i, src + i, nbytes - i);
    lanes.step(last);
  }
  return lanes.finish();
}

Digest one_piece(char* dst, const char* src, size_t nbytes, uint64_t seed) {
  return dst ? digest_piece<true>(dst, src, nbytes, seed)
             : digest_piece<false>(dst, src, nbytes, seed);
}

}  // namespace

Digest digest(void* dst, const void* src, size_t nbytes, int threads) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  // The length is part of the seed, so padding the last step with zeros is no ambiguity.
  if (nbytes <= kPiece) return one_piece(to, from, nbytes, nbytes);
  const size_t pieces = (nbytes + kPiece - 1) / kPiece;
  const std::unique_ptr<uint64_t[]> words(new uint64_t[2 * pieces]);
  threads = thread_count(threads, nbytes / kParallel);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
#endif
  for (size_t p = 0; p < pieces; ++p) {
    const size_t start = p * kPiece, size = nbytes - start < kPiece ? nbytes - start : kPiece;
    const Digest d = one_piece(to ? to + start : nullptr, from + start, size, size);
    words[2 * p] = d.low;
    words[2 * p + 1] = d.high;
  }
  const auto* list = reinterpret_cast<const char*>(words.get());
  return digest_piece<false>(nullptr, list, 16 * pieces, ~uint64_t(nbytes));
}

void copy(void* dst, const void* src, size_t nbytes, int threads) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  threads = thread_count(threads, nbytes / kParallel);
  if (threads <= 1) {
    if (nbytes) std::memcpy(to, from, nbytes);
    return;
  }
  const size_t pieces = (nbytes + kPiece - 1) / kPiece;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
#endif
  for (size_t p = 0; p < pieces; ++p) {
    const size_t start = p * kPiece, size = nbytes - start < kPiece ? nbytes - start : kPiece;
    std::memcpy(to + start, from + start, size);
  }
}

}  // namespace tensortap
