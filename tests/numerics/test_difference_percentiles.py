"""Exact percentiles of any number of values, many of them equal or not, in bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from difference_definitions import BACKENDS, ISAS, difference_by, difference_of_by
from hypothesis import given, settings
from hypothesis import strategies as st

import tensortap.numerics.ordering as ordering
from tensortap.numerics.ordering import Ordering
from tensortap.numerics.percentiles import from_histogram, interpolated, ranks

backends = pytest.mark.parametrize("backend", BACKENDS)
PERCENTS = [50, 90, 95, 99]


def expected(reference: torch.Tensor, candidate: torch.Tensor) -> dict[int, float]:
    distances = np.abs(candidate.double().numpy() - reference.double().numpy())
    values = np.percentile(distances[np.isfinite(distances)], PERCENTS)
    return dict(zip(PERCENTS, values.tolist(), strict=True))


distances = st.one_of(
    st.floats(0, 1e300),
    st.sampled_from([0.0, 5e-324, 1.0, np.nextafter(1.0, 2.0), 1e-300, 0.5, 1.797e308]),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.lists(distances, min_size=1, max_size=80),
    keep=st.integers(0, 60),
    chunk=st.integers(1, 40),
)
def test_counting_bits_finds_every_rank(values: list[float], keep: int, chunk: int) -> None:
    """Whatever may be kept, down to nothing, when four passes must tell the value itself."""
    array = np.array(values)
    parts = [array[k : k + chunk] for k in range(0, len(array), chunk)]
    passes = 0

    def again() -> list[np.ndarray]:
        nonlocal passes
        passes += 1
        return parts

    found = Ordering(keep)
    for part in parts:
        found.add(part)
    wanted = list(range(len(values)))
    assert found.values_at(wanted, again) == sorted(values)
    assert passes <= 3 and (passes == 0) == (len(values) <= keep)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=120))
def test_interpolation_is_numpys(values: list[float]) -> None:
    ordered = np.sort(np.array(values))
    found = interpolated(ordered[list(ranks(len(values)))].tolist(), len(values))
    assert list(found.values()) == np.percentile(ordered, PERCENTS).tolist()


def test_ranks_of_nothing() -> None:
    assert ranks(0) == () and ranks(1) == (0,)


# Above the core's sample, and not: all different, on a grid, nearly all equal, two values, skewed.
SHAPES = {
    "normal": lambda x: (x, x + 1e-3 * x.roll(1)),
    "grid": lambda x: ((4 * x).round(), (4 * x.roll(1)).round()),
    "all equal": lambda x: (x.round(), x.round() + 1),
    "equal but few": lambda x: (x, torch.where(x > 3, x + x.roll(1), x)),
    "two values": lambda x: (x * 0, (x > 1.2816).to(x.dtype)),
    "sorted": lambda x: (x * 0, x.sort().values),
    "one region": lambda x: (x * 0, torch.where(torch.arange(x.numel()) < 30_000, 1e3 * x, x)),
    "skewed": lambda x: (x * 0, (3 * x).exp()),
    "periodic": lambda x: (x * 0, (torch.arange(x.numel()) % 64).to(x.dtype)),
    "some nan": lambda x: (x, torch.where(x > 1, torch.nan, x.roll(1))),
}


@backends
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors(backend: str, shape: str, dtype: torch.dtype) -> None:
    size = 300_001 if backend == "reference" else 1_300_001
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    one, two = (side.to(dtype) for side in SHAPES[shape](x))
    found = difference_by(backend, one, two)
    assert found.percentiles == expected(one, two) and found.percentiles_exact


@backends
def test_large_tensors_of_integers_and_doubles(backend: str) -> None:
    x = 40 * torch.randn(300_001, generator=torch.Generator().manual_seed(2))
    for one, two in (
        (x.to(torch.int8), x.roll(1).to(torch.int8)),
        (x.to(torch.int64), x.to(torch.float64)),
        (1e-200 * x.double(), 2e-200 * x.double()),
    ):
        assert difference_by(backend, one, two).percentiles == expected(one, two)


@backends
def test_a_stream_has_the_percentiles_of_all(backend: str) -> None:
    """Of parts that have nothing in common, so that no part's sample tells of another."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(3))
    parts = [x[:300_000], 1e3 * x[300_000:399_990], 1e-6 * x[399_990:], x[:0]]
    stream = [(torch.zeros_like(part), part) for part in parts]
    whole = torch.cat(parts)
    found = difference_of_by(backend, stream)
    assert found.percentiles == expected(torch.zeros_like(whole), whole)


@pytest.mark.parametrize("backend", ISAS)
@pytest.mark.parametrize("shape", ["normal", "periodic", "one region", "sorted"])
def test_the_histogram_of_many_is_that_of_an_even_sample(backend: str, shape: str) -> None:
    """A period in the data must not meet one in the sample, nor a region be passed over."""
    one, two = SHAPES[shape](torch.randn(3_000_001, generator=torch.Generator().manual_seed(5)))
    found = difference_by(backend, one, two)
    assert found.histogram is not None and 1 << 18 <= found.histogram.total <= 3_000_001
    roughly = from_histogram(found.histogram, found.max_abs)
    for percent, value in expected(one, two).items():
        assert roughly[percent] == pytest.approx(value, rel=0.1), percent
    merged = found.merge(found)
    assert merged.histogram is not None and merged.histogram.total == 6_000_002


def test_the_reference_keeps_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "KEEP", 1000)
    for name in ("normal", "grid", "all equal", "two values"):
        one, two = SHAPES[name](torch.randn(50_000, generator=torch.Generator().manual_seed(4)))
        assert difference_by("reference", one, two).percentiles == expected(one, two)


SCRIPT = """
import resource, sys, warnings
import numpy as np, torch
import tensortap.numerics.ordering as ordering
import tensortap.numerics.reference_difference as reference_difference
from difference_definitions import use
from tensortap.numerics.difference import difference
backend, path, count, room = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
warnings.simplefilter("ignore")
torch.set_num_threads(1 if backend == "reference" else 2)
ordering.KEEP, reference_difference.CHUNK = 1 << 18, 1 << 16
whole = torch.from_numpy(np.memmap(path, np.float32, "r", shape=(2, count)))
with use(backend, threads=2):
    difference(whole[0, :600_000].clone(), torch.ones(600_000))  # what is loaded but once
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + room,) * 2)
    found = difference(whole[0], whole[1])
print(found.count, found.percentiles_exact, found.p50)
"""


@backends
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA as Linux has it")
def test_memory_is_bounded(backend: str, tmp_path: Path) -> None:
    """Two tensors in a mapped file, with room for a part of one in float64, and all |d| equal."""
    count, room = (3 << 20, 20 << 20) if backend == "reference" else (48 << 20, 160 << 20)
    path = tmp_path / "pair.bin"
    with path.open("wb") as file:
        file.truncate(8 * count)  # all zeros, and nothing on disk
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, backend, str(path), str(count), str(room)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(count), "True", "0.0"]
