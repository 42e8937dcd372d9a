"""Who is picked, what views mean, and that looking changes nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from definitions import BACKENDS, assert_defines

import tensortap.numerics.backend as backend
import tensortap.numerics.native as native
from tensortap.errors import OptionError
from tensortap.numerics import summarize
from tensortap.numerics.backend import describe, pick
from tensortap.numerics.reference import ReferenceBackend

needs_core = pytest.mark.skipif(native.core is None, reason="the core is not built")


@pytest.fixture(autouse=True)
def read_the_environment_anew() -> Iterator[None]:
    backend._forced.cache_clear()
    yield
    backend._forced.cache_clear()


@pytest.fixture(params=["native", "reference"])
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and native.core is None:
        pytest.skip("the core is not built")
    monkeypatch.setenv("TENSORTAP_BACKEND", request.param)
    return str(request.param)


def base() -> torch.Tensor:
    return torch.randn(6, 40, 50, generator=torch.Generator().manual_seed(0))


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(3, 0, 2),
    "offset": lambda: base()[2:4],
    "transposed": lambda: base().transpose(0, 2),
    "steps": lambda: base()[:, ::3, 1::7],
    "expanded": lambda: base()[:, :1].expand(6, 9, 50),
    "flipped": lambda: base().flip(1),
    "diagonal": lambda: base()[0].diagonal(),
    "a column": lambda: base()[0, :, 3],
    "channels last": lambda: base()[None].contiguous(memory_format=torch.channels_last),
    "parameter": lambda: torch.nn.Parameter(base()),
    "in a graph": lambda: torch.nn.Parameter(base()) * 2,
    "conjugate": lambda: torch.view_as_complex(base().view(-1, 2)).conj(),
    "negative": lambda: torch.view_as_complex(base().view(-1, 2)).conj().imag,
    "complex steps": lambda: torch.view_as_complex(base().view(-1, 2))[::3],
    "inference": lambda: torch.inference_mode()(base)(),
    "subclass": lambda: base().as_subclass(type("Own", (torch.Tensor,), {})),
    "half steps": lambda: base().half()[..., ::2],
    "bytes, transposed": lambda: (base() * 20).to(torch.int8).transpose(1, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_read_as_their_elements(forced: str, view: str) -> None:
    tensor = VIEWS[view]()
    summary = summarize(tensor, histogram=True)
    assert_defines(summary, torch.Tensor(tensor.detach()) if view == "subclass" else tensor)


def test_views_larger_than_a_piece(forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_COPY_LIMIT", 100)
    monkeypatch.setattr("tensortap.numerics.reference.CHUNK", 100)
    for tensor in (base()[:, ::3, 1::7], base()[:, :, 3], base().expand(2, 6, 40, 50), base()):
        assert_defines(summarize(tensor, histogram=True), tensor)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_values_are_what_they_stand_for(forced: str) -> None:
    x = torch.linspace(-1, 1, 50)
    quantised = torch.quantize_per_tensor(x, 0.1, 3, torch.qint8)
    assert_defines(summarize(quantised), quantised.dequantize())


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(3, device="meta"), "meta tensor of shape .3,. holds no values"),
        (torch.eye(3).to_sparse(), r"sparse_coo.*tensor\.values\(\)"),
    ],
)
def test_what_has_no_values_is_refused_in_words(
    forced: str, tensor: torch.Tensor, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        summarize(tensor)


def test_looking_changes_nothing(forced: str) -> None:
    tensor = torch.randn(1000, requires_grad=True)
    strided = torch.randn(40, 50)[:, ::3]
    for seen in (tensor, strided):
        before, version = seen.detach().clone(), seen._version
        state = torch.get_rng_state()
        summarize(seen, histogram=True)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(seen, before) and seen._version == version
    assert tensor.grad_fn is None and tensor.grad is None
    with torch.inference_mode():
        summarize(torch.randn(5))
    result = (tensor * 2).sum()
    summarize(result)
    result.backward()
    assert torch.equal(tensor.grad, torch.full_like(tensor, 2.0))


@needs_core
def test_the_core_takes_plain_cpu_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORTAP_BACKEND", raising=False)
    assert pick(torch.ones(3)).name == "native"
    assert pick(VIEWS["subclass"]()).name == "reference"
    assert pick(torch.eye(2).to_sparse()).name == "reference"
    monkeypatch.setenv("TENSORTAP_BACKEND", "reference")
    backend._forced.cache_clear()
    assert isinstance(pick(torch.ones(3)), ReferenceBackend)


def test_an_unknown_backend_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORTAP_BACKEND", "abacus")
    with pytest.raises(OptionError, match=r"'abacus', but the backends are: .*reference"):
        pick(torch.ones(1))


def test_without_the_core_everything_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORTAP_BACKEND", raising=False)
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(native, "missing", "the compiled core could not be loaded (no such file)")
    assert pick(torch.ones(3)).name == "reference"
    assert summarize(torch.ones(3)).mean == 1.0
    report = describe()
    assert (report["backend"], report["isa"]) == ("reference", None)
    assert "no such file" in report["why"]
    monkeypatch.setenv("TENSORTAP_BACKEND", "native")
    backend._forced.cache_clear()
    with pytest.raises(OptionError, match=r"asks for the native backend, but .*no such file"):
        pick(torch.ones(1))


@needs_core
@pytest.mark.parametrize("isa", native.core.isas() if native.core is not None else [])
def test_a_lower_instruction_set_can_be_forced(isa: str) -> None:
    code = "import torch; from tensortap.numerics.backend import describe; print(describe()['isa'])"
    environment = {**os.environ, "TENSORTAP_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == isa
    assert isa in BACKENDS


@needs_core
def test_the_core_refuses_what_it_does_not_know() -> None:
    assert native.core is not None
    with pytest.raises(ValueError, match="dtype"):
        native.core.summarize(0, 0, 99, 0)
    with pytest.raises(ValueError, match="instruction set"):
        native.core.summarize(0, 0, 0, 0, isa=7)


@needs_core
def test_the_hot_path_declines_views_and_writes_nothing() -> None:
    from array import array

    row = array("d", [math.pi] * 23)
    where = row.buffer_info()[0]
    assert not native.summarize_into(base().transpose(0, 1), where)
    assert set(row) == {math.pi}
    assert native.summarize_into(base(), where) and row[0] == 12_000


@needs_core
def test_one_thread_pool_is_shared_with_torch() -> None:
    """A second OpenMP runtime in the process would fight with torch for the cores.

    In a process of its own: other libraries that a test may load bring theirs along.
    """
    import subprocess
    import sys
    from pathlib import Path

    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    code = """
import torch, tensortap as tap
tap.summarize(torch.ones(1 << 20))
torch.ones(1 << 20).sum()
maps = open("/proc/self/maps").read().splitlines()
print(len({line.split()[-1] for line in maps if "libgomp" in line}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1
