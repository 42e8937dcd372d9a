// The Python module tensortap._core: addresses and lengths in, numbers out.

#include "core.hpp"
#include "difference.hpp"
#include "percentiles.hpp"
#include "shortcut.hpp"

#include <cstdlib>
#include <cstring>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace tensortap {

extern const Kernels kernels_baseline;
#ifdef TENSORTAP_X86_64
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

const Kernels* kernels_at(int index) {
  if (index == 0) return &kernels_baseline;
#ifdef TENSORTAP_X86_64
  if (index == 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2"))
    return &kernels_avx2;  // every CPU with AVX2 has F16C
  if (index == 2 && kernels_at(1) && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return &kernels_avx512;
#endif
  return nullptr;
}

namespace {

// The best the CPU has, or what TENSORTAP_ISA names if that is lower.
const Kernels& choose() {
  const char* forced = std::getenv("TENSORTAP_ISA");
  const Kernels* best = &kernels_baseline;
  for (int index = 0; index < 3; ++index) {
    const Kernels* kernels = kernels_at(index);
    if (!kernels) continue;
    best = kernels;
    if (forced && std::strcmp(forced, kernels->name) == 0) break;
  }
  return *best;
}

int index_of(const Kernels& kernels) {
  int index = 0;
  while (kernels_at(index) != &kernels) ++index;
  return index;
}

// Below this many bytes, giving up the GIL costs more than the work.
constexpr std::size_t kRelease = 1 << 16;

template <class Work>
auto without_gil(std::size_t nbytes, Work work) {
  if (nbytes < kRelease) return work();
  nb::gil_scoped_release release;
  return work();
}

void py_summarize(std::uintptr_t data, std::size_t n, int dtype, std::uintptr_t out,
                  std::uintptr_t histogram, int threads, int isa) {
  if (dtype < 0 || dtype >= kDtypes) throw nb::value_error("unknown dtype code");
  const Kernels* kernels = isa < 0 ? &active_kernels() : kernels_at(isa);
  if (!kernels) throw nb::value_error("this CPU lacks that instruction set");
  without_gil(n * element_size(dtype), [&] {
    summarize(*kernels, reinterpret_cast<const void*>(data), n, dtype,
              reinterpret_cast<double*>(out), reinterpret_cast<std::int64_t*>(histogram), threads);
  });
}

nb::bytes as_bytes(const Digest& d) { return nb::bytes(reinterpret_cast<const char*>(&d), 16); }

nb::bytes py_digest(std::uintptr_t src, std::size_t nbytes, int threads) {
  return as_bytes(without_gil(
      nbytes, [&] { return digest(nullptr, reinterpret_cast<const void*>(src), nbytes, threads); }));
}

// Of many stretches: an address and a length each in `table`, 16 bytes each in `out`. Many short
// calls would take and give the GIL as often, and another thread wants it.
void py_digest_many(std::uintptr_t table, std::size_t n, std::uintptr_t out, int threads) {
  nb::gil_scoped_release release;
  const auto* stretch = reinterpret_cast<const std::uint64_t*>(table);
  auto* found = reinterpret_cast<Digest*>(out);
  for (std::size_t k = 0; k < n; ++k)
    found[k] = digest(nullptr, reinterpret_cast<const void*>(stretch[2 * k]), stretch[2 * k + 1],
                      threads);
}

nb::bytes py_copy_digest(std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes, int threads) {
  return as_bytes(without_gil(nbytes, [&] {
    return digest(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes,
                  threads);
  }));
}

void py_copy(std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes, int threads) {
  without_gil(nbytes, [&] {
    copy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes, threads);
  });
}

std::uint64_t py_plain_read(std::uintptr_t src, std::size_t nbytes, int threads) {
  return without_gil(nbytes, [&] {
    constexpr std::size_t kPart = 1 << 18;
    const auto* p = reinterpret_cast<const char*>(src);
    const std::size_t parts = (nbytes + kPart - 1) / kPart;
    const Kernels& kernels = active_kernels();
    const int team = thread_count(threads, nbytes >> 19);
    std::uint64_t result = 0;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 2) reduction(| : result) num_threads(team) if (team > 1)
#else
    (void)team;
#endif
    for (std::size_t k = 0; k < parts; ++k) {
      const std::size_t start = k * kPart;
      result |= kernels.read(p + start, nbytes - start < kPart ? nbytes - start : kPart);
    }
    return result;
  });
}

Pair pair_of(std::uintptr_t r, int r_dtype, std::uintptr_t c, int c_dtype) {
  for (int dtype : {r_dtype, c_dtype})
    if (dtype < 0 || dtype >= kDtypes) throw nb::value_error("unknown dtype code");
  return make_pair(reinterpret_cast<const void*>(r), r_dtype, reinterpret_cast<const void*>(c),
                   c_dtype);
}

const PairKernels& pair_kernels(int isa) {
  const PairKernels* kernels = pair_kernels_at(isa);
  if (!kernels) throw nb::value_error("this CPU lacks that instruction set");
  return *kernels;
}

std::size_t pair_bytes(const Pair& pair, std::size_t n) {
  return n * (element_size(pair.r_dtype) + element_size(pair.c_dtype));
}

void py_difference(std::uintptr_t r, int r_dtype, std::uintptr_t c, int c_dtype, std::size_t n,
                   double rtol, double atol, std::uintptr_t out, Percentiles* percentiles,
                   int threads, int isa) {
  Pair pair = pair_of(r, r_dtype, c, c_dtype);
  pair.rtol = rtol, pair.atol = atol;
  const PairKernels& kernels = pair_kernels(isa);
  without_gil(pair_bytes(pair, n), [&] {
    difference(kernels, pair, n, reinterpret_cast<double*>(out), percentiles, threads);
  });
}

void py_sample(Percentiles& self, std::uintptr_t r, int r_dtype, std::uintptr_t c, int c_dtype,
               std::size_t n, int threads, int isa) {
  const Pair pair = pair_of(r, r_dtype, c, c_dtype);
  const PairKernels& kernels = pair_kernels(isa);
  without_gil(pair_bytes(pair, n), [&] { self.sample(kernels, pair, n, threads); });
}

void py_sample_runs(Percentiles& self, std::uintptr_t r, int r_dtype, std::uintptr_t c, int c_dtype,
                    std::uint64_t n, int isa) {
  self.sample_runs(pair_kernels(isa), pair_of(r, r_dtype, c, c_dtype), n);
}

void py_scan(Percentiles& self, std::uintptr_t r, int r_dtype, std::uintptr_t c, int c_dtype,
             std::size_t n, int threads, int isa) {
  const Pair pair = pair_of(r, r_dtype, c, c_dtype);
  const PairKernels& kernels = pair_kernels(isa);
  without_gil(pair_bytes(pair, n), [&] { self.scan(kernels, pair, n, threads); });
}

void py_profile(std::uintptr_t r, int r_dtype, std::uintptr_t c, int c_dtype, std::size_t rows,
                std::size_t width, std::uintptr_t tokens, std::uintptr_t channels, int threads,
                int isa) {
  const Pair pair = pair_of(r, r_dtype, c, c_dtype);
  const PairKernels& kernels = pair_kernels(isa);
  without_gil(pair_bytes(pair, rows * width), [&] {
    profile(kernels, pair, rows, width, reinterpret_cast<double*>(tokens),
            reinterpret_cast<double*>(channels), threads);
  });
}

std::vector<std::string> py_isas() {
  std::vector<std::string> names;
  for (int index = 0; index < 3; ++index)
    if (const Kernels* kernels = kernels_at(index)) names.emplace_back(kernels->name);
  return names;
}

bool py_openmp() {
#ifdef _OPENMP
  return true;
#else
  return false;
#endif
}

}  // namespace

const Kernels& active_kernels() {
  static const Kernels& kernels = choose();
  return kernels;
}

const PairKernels* pair_kernels_at(int index) {
  static const int active = index_of(active_kernels());
  if (index < 0) index = active;
  if (!kernels_at(index)) return nullptr;
#ifdef TENSORTAP_X86_64
  if (index == 1) return &pair_kernels_avx2;
  if (index == 2) return &pair_kernels_avx512;
#endif
  return &pair_kernels_baseline;
}

}  // namespace tensortap

NB_MODULE(_core, m) {
  using namespace tensortap;
  using namespace nb::literals;
  nb::set_leak_warnings(false);  // a process may end with a recording open
  active_kernels();
  m.def("summarize", &py_summarize, "ptr"_a, "n"_a, "dtype"_a, "out_ptr"_a, "histogram_ptr"_a = 0,
        "threads"_a = 0, "isa"_a = -1);
  m.def("copy", &py_copy, "dst"_a, "src"_a, "nbytes"_a, "threads"_a = 0);
  m.def("digest", &py_digest, "src"_a, "nbytes"_a, "threads"_a = 0);
  m.def("digest_many", &py_digest_many, "table"_a, "n"_a, "out"_a, "threads"_a = 0);
  m.def("copy_digest", &py_copy_digest, "dst"_a, "src"_a, "nbytes"_a, "threads"_a = 0);
  m.def("plain_read", &py_plain_read, "ptr"_a, "nbytes"_a, "threads"_a = 0);
  nb::class_<Percentiles>(m, "Percentiles")
      .def(nb::init<std::uint64_t>(), "total"_a)
      .def("sample", &py_sample, "reference"_a, "reference_dtype"_a, "candidate"_a,
           "candidate_dtype"_a, "n"_a, "threads"_a = 0, "isa"_a = -1)
      .def("places", &Percentiles::places, "n"_a)
      .def("sample_runs", &py_sample_runs, "reference"_a, "reference_dtype"_a, "candidate"_a,
           "candidate_dtype"_a, "n"_a, "isa"_a = -1)
      .def("plan", &Percentiles::plan, nb::call_guard<nb::gil_scoped_release>())
      .def("scan", &py_scan, "reference"_a, "reference_dtype"_a, "candidate"_a,
           "candidate_dtype"_a, "n"_a, "threads"_a = 0, "isa"_a = -1)
      .def("settle", &Percentiles::settle, "finite"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("values", &Percentiles::values)
      .def("histogram", [](const Percentiles& self, std::uintptr_t out) {
        std::memcpy(reinterpret_cast<void*>(out), self.histogram().data(),
                    kBuckets * sizeof(std::int64_t));
      }, "out_ptr"_a);
  m.attr("RUN") = kRun;
  m.def("difference", &py_difference, "reference"_a, "reference_dtype"_a, "candidate"_a,
        "candidate_dtype"_a, "n"_a, "rtol"_a, "atol"_a, "out_ptr"_a,
        "percentiles"_a.none() = nb::none(), "threads"_a = 0, "isa"_a = -1);
  m.def("profile", &py_profile, "reference"_a, "reference_dtype"_a, "candidate"_a,
        "candidate_dtype"_a, "rows"_a, "width"_a, "tokens_ptr"_a, "channels_ptr"_a,
        "threads"_a = 0, "isa"_a = -1);
  m.def("isa", [] { return std::string(active_kernels().name); });
  m.def("isas", &py_isas);
  m.def("openmp", &py_openmp);
  bind_shortcut(m);
}
