"""The public face: views, limits, grades, sentences; and that looking changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import torch
from difference_definitions import BACKENDS, Definition, difference_by
from test_backends import VIEWS, base

import tensortap.numerics.backend as backend
import tensortap.numerics.native as native
import tensortap.numerics.reference_difference as reference_difference
from tensortap.errors import OptionError
from tensortap.numerics.difference import METRICS, Difference, difference, difference_of
from tensortap.numerics.difference_row import tolerances

backends = pytest.mark.parametrize("backend", BACKENDS)
needs_core = pytest.mark.skipif(native.core is None, reason="the core is not built")


@pytest.fixture(autouse=True)
def read_the_environment_anew() -> Iterator[None]:
    backend._forced.cache_clear()
    yield
    backend._forced.cache_clear()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return torch.Tensor(tensor.detach()) if type(tensor).__name__ == "Own" else tensor


@pytest.mark.parametrize("forced", ["native", "reference"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_read_as_their_elements(
    forced: str, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view against a plain tensor, both ways, and against itself."""
    if forced == "native" and native.core is None:
        pytest.skip("the core is not built")
    monkeypatch.setenv("TENSORTAP_BACKEND", forced)
    tensor = VIEWS[view]()
    other = (plain(tensor).detach().resolve_conj() * 1.01).to(tensor.dtype).clone()
    for one, two in ((tensor, other), (other, tensor), (tensor, tensor)):
        found = difference(one, two)
        # Fractions of ten thousand numbers take long: a few say as much of a view.
        assert found.count == tensor.numel() * (2 if tensor.is_complex() else 1)
        small = [plain(side)[tuple(slice(0, 3) for _ in side.shape)] for side in (one, two)]
        Definition([(small[0], small[1])]).check(difference(*small))
        flat = [plain(side).detach().resolve_conj().resolve_neg().contiguous() for side in small]
        assert repr(difference(*small)) == repr(difference(*flat))
    assert found.identical


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    "steps": lambda t: torch.stack((t, t), dim=-1)[..., 1],
    "channels last": lambda t: t[None].contiguous(memory_format=torch.channels_last)[0],
}


@backends
@pytest.mark.parametrize("second", STRIDED)
@pytest.mark.parametrize("first", STRIDED)
def test_strides_do_not_matter(
    backend: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    r, c = base(), base() + 0.01 * base().roll(1, dims=0)
    expected = difference_by(backend, r, c)
    for chunk in (1 << 20, 1000):
        monkeypatch.setattr(reference_difference, "CHUNK", chunk)
        found = difference_by(backend, STRIDED[first](r), STRIDED[second](c))
        assert found.max_abs_index == expected.max_abs_index
        assert found.percentiles == expected.percentiles
        assert found.mismatched == expected.mismatched
        for name in ("mean", "std", "mae", "mse", "cosine_distance", "correlation", "rel"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9), name


@backends
def test_the_place_of_the_largest(backend: str) -> None:
    r = torch.zeros(4, 5, 6)
    c = r.clone()
    c[2, 3, 4] = -7
    c[3, 0, 0] = 7
    assert difference_by(backend, r, c).max_abs_index == (2, 3, 4)
    assert difference_by(backend, r, c).max_abs_pair == (0.0, -7.0)
    assert difference_by(backend, r.transpose(0, 2), c.transpose(0, 2)).max_abs_index == (0, 0, 3)
    assert difference_by(backend, r[0, 0, 0], c[0, 0, 0]).max_abs_index == ()
    assert difference_by(backend, r, r.clone()).max_abs_index == (0, 0, 0)
    r[0] = math.nan
    assert difference_by(backend, r, r.clone()).max_abs_index == (1, 0, 0)


def test_sizes_that_a_pair_of_index_and_number_must_tell_apart() -> None:
    first, second = torch.zeros(3, 2), torch.zeros(2, 4)
    other = second.clone()
    other[1, 2] = 1
    found = difference_of([(first, first), (torch.zeros(0), torch.zeros(0)), (second, other)])
    assert found.max_abs_index == (2, 1, 2)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (torch.float32, torch.float32, (1.3e-6, 1e-5)),
        (torch.float32, torch.bfloat16, (1.6e-2, 1e-5)),
        (torch.float64, torch.float32, (1.3e-6, 1e-5)),
        (torch.float64, torch.float64, (1e-7, 1e-7)),
        (torch.float16, torch.float64, (1e-3, 1e-5)),
        (torch.complex64, torch.complex128, (1.3e-6, 1e-5)),
        (torch.int8, torch.int64, (0.0, 0.0)),
        (torch.bool, torch.float16, (1e-3, 1e-5)),
        (torch.float8_e4m3fn, torch.float32, (0.125, 1e-5)),
        (torch.float8_e5m2, torch.float8_e4m3fn, (0.25, 1e-5)),
    ],
)
def test_tolerances_are_the_looser_of_the_two(
    one: torch.dtype, two: torch.dtype, expected: tuple[float, float]
) -> None:
    assert tolerances(one, two) == tolerances(two, one) == expected
    if one == two:
        from torch.testing._comparison import default_tolerances

        assert default_tolerances(one, two) == expected


@pytest.mark.parametrize(
    ("mse", "grade"),
    [
        *((0.0, "very close"), (9.9e-5, "very close"), (1.1e-4, "good"), (9.9e-4, "good")),
        *((1.1e-3, "fair"), (9.9e-3, "fair"), (1.1e-2, "large"), (math.inf, "large")),
        (math.nan, "undefined"),
    ],
)
def test_grades(mse: float, grade: str) -> None:
    assert replace(difference(torch.ones(2), torch.ones(2)), mse=mse).grade == grade


@pytest.mark.parametrize(
    ("correlation", "grade"),
    [
        *((1.0, "nearly perfect"), (0.99991, "nearly perfect"), (0.9999, "excellent")),
        *((0.9991, "excellent"), (0.999, "good"), (0.991, "good"), (0.99, "needs attention")),
        *((-1.0, "needs attention"), (math.nan, "undefined")),
    ],
)
def test_grades_of_correlation(correlation: float, grade: str) -> None:
    found = replace(difference(torch.ones(2), torch.ones(2)), correlation=correlation)
    assert found.correlation_grade == grade


def test_good_across_devices_is_all_three_limits() -> None:
    x = torch.linspace(-1, 1, 1001)
    outlier = x.clone()
    outlier[500] += 0.02
    assert difference(x, x + 0.0005).device_good
    assert not difference(x, outlier).device_good  # max abs
    assert not difference(x, x + 0.002).device_good  # mean abs
    assert not difference(1e-4 * x, -1e-4 * x).device_good  # cosine
    assert not difference(x, torch.where(x > 0.9, torch.nan, x)).device_good
    assert difference(torch.zeros(3), torch.zeros(3)).device_good
    assert not difference(torch.zeros(3), torch.full((3,), 1e-5)).device_good


def test_every_metric_is_a_number_to_compare() -> None:
    found = difference(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]))
    for name in METRICS:
        assert isinstance(getattr(found, name), (int, float)), name
        float(getattr(found, name))
    without = difference(torch.ones(1), torch.ones(1), percentiles=False)
    assert math.isnan(without.p99) and without.percentiles is None
    assert {"mse", "max_abs", "cosine", "p99", "error"} <= set(METRICS)
    assert list(METRICS) == sorted(set(METRICS))


def test_the_page_of_numbers_has_every_metric() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "numbers.md").read_text()
    names = {*METRICS, *(field.name for field in fields(Difference))} - {"row"}
    assert not [name for name in names if f"`{name}`" not in page]


def test_the_dictionary_is_strict_json() -> None:
    found = difference(torch.tensor([[1.0, math.nan]]), torch.tensor([[1.5, math.nan]]))
    plain_numbers = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain_numbers["mse"] == 0.25 and plain_numbers["max_abs_index"] == [0, 0]
    assert plain_numbers["max_abs_pair"] == [1.0, 1.5]
    assert (
        plain_numbers["correlation"] is None and plain_numbers["correlation_grade"] == "undefined"
    )
    assert plain_numbers["percentiles"] == {"50": 0.5, "90": 0.5, "95": 0.5, "99": 0.5}
    assert plain_numbers["dtypes"] == ["float32", "float32"] and plain_numbers["error"] == 0.5
    same = difference(torch.ones(2), torch.ones(2), percentiles=False).to_dict()
    assert same["sqnr_db"] == "inf" and same["percentiles"] is None and same["identical"] is True
    empty = difference(torch.ones(0), torch.ones(0)).to_dict()
    assert json.dumps(empty, allow_nan=False) and empty["max_abs_index"] is None
    assert empty["percentiles"]["50"] is None and empty["grade"] == "undefined"


def test_a_difference_cannot_be_changed() -> None:
    found = difference(torch.ones(2), torch.zeros(2))
    with pytest.raises(FrozenInstanceError):
        found.mse = 0.0  # type: ignore[misc]
    assert "histogram" not in repr(found) and "row" not in repr(found)


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), r"shape \(2, 3\), but the candidate \(2, 4\)"),
        (torch.ones(6), torch.ones(1, 6), r"shape \(6,\), but the candidate \(1, 6\)"),
        (torch.ones(3), [1.0, 2.0, 3.0], "the candidate is a list.*torch.as_tensor"),
        (torch.ones(3, device="meta"), torch.ones(3), "meta tensor"),
        (torch.ones(3), torch.ones(3).to_sparse(), "sparse_coo"),
    ],
)
def test_what_cannot_be_subtracted_is_refused_in_words(
    one: torch.Tensor, two: torch.Tensor, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        difference(one, two)
    with pytest.raises(OptionError, match=words):
        difference_of([(torch.ones(1), torch.ones(1)), (one, two)])


def test_pairs_that_can_be_read_but_once_are_refused_in_words() -> None:
    pairs = [(torch.ones(1), torch.zeros(1))]
    with pytest.raises(OptionError, match=r"a list_iterator can be read but once.*a function"):
        difference_of(iter(pairs))  # type: ignore[arg-type]
    assert difference_of(lambda: iter(pairs)).mse == 1.0


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_limits_must_be_limits(value: float) -> None:
    with pytest.raises(OptionError, match="rtol must be 0 or more, but got"):
        difference(torch.ones(1), torch.ones(1), rtol=value)
    with pytest.raises(OptionError, match="atol must be 0 or more, but got"):
        difference(torch.ones(1), torch.ones(1), atol=value)


@backends
def test_looking_changes_nothing(backend: str) -> None:
    one = torch.randn(1000, requires_grad=True)
    two = torch.randn(40, 50)[:, ::2].reshape(-1)
    before, versions = (one.detach().clone(), two.clone()), (one._version, two._version)
    state = torch.get_rng_state()
    found = difference_by(backend, one, two)
    difference_by(backend, one * 2, two)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, before[0]) and torch.equal(two, before[1])
    assert (one._version, two._version) == versions and one.grad is None
    with torch.inference_mode():
        assert repr(difference_by(backend, one, two)) == repr(found)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_values_are_what_they_stand_for() -> None:
    x = torch.linspace(-1, 1, 50)
    quantised = torch.quantize_per_tensor(x, 0.1, 3, torch.qint8)
    found = difference(x, quantised)
    assert found.max_abs == difference(x, quantised.dequantize()).max_abs > 0
    assert found.dtypes == ("float32", "qint8")


@needs_core
def test_the_core_takes_plain_cpu_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORTAP_BACKEND", raising=False)
    x, own = torch.ones(3), VIEWS["subclass"]()
    assert backend.pick_pair(x, x).name == "native"
    assert backend.pick_pair(own, own).name == "reference"
    assert backend.pick_pair(x, own).name == "reference"
    monkeypatch.setenv("TENSORTAP_BACKEND", "reference")
    backend._forced.cache_clear()
    assert backend.pick_pair(x, x).name == "reference"


def test_a_stream_may_end_with_what_the_core_cannot_read() -> None:
    own, x = VIEWS["subclass"](), base()
    found = difference_of([(x, x + 1), (own, x), (x, x)])
    assert (found.count, found.max_abs) == (3 * x.numel(), float((x + 1 - x).double().abs().max()))
    assert found.max_abs_index is not None and found.max_abs_index[0] == 0


def test_without_the_core_everything_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORTAP_BACKEND", raising=False)
    monkeypatch.setattr(native, "core", None)
    assert backend.pick_pair(torch.ones(1), torch.ones(1)).name == "reference"
    assert difference(torch.ones(3), torch.zeros(3)).mse == 1.0


def test_the_state_survives_replacing_a_field() -> None:
    """As the comparison does with the index."""
    found: Difference = difference(torch.zeros(2), torch.ones(2))
    moved = replace(found, max_abs_index=(5, 5))
    assert moved.merge(found).max_abs_index == (5, 5) and moved.merge(found).count == 4
