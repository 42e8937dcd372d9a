"""What a collective returns is recorded once it ended: two real processes on gloo.

The other rank is slow, so that a hook that did not wait would see this rank's part of the sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap

distributed = pytest.importorskip("torch.distributed")
if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

RANKS = 2
EVERYTHING: dict[str, Any] = {"layers": "all", "inputs": True, "grads": True}


class Tower(nn.Module):
    """Two linears to split, and what a model may do with their sum by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)
        self.end = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.down(self.act(self.up(x))))


class Reduced(nn.Module):
    """Functional collectives as a module's own output: the sum, and a view of it."""

    def forward(self, x: torch.Tensor) -> Any:
        import torch.distributed._functional_collectives as collectives

        if not distributed.is_initialized():
            return {"sum": x * RANKS, "view": (x * RANKS).view(-1)}
        group = distributed.group.WORLD
        summed = collectives.all_reduce(x, "sum", group)
        return {"sum": summed, "view": collectives.all_reduce(x, "sum", group).view(-1)}


def data() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def slow_on_rank_1(model: nn.Module) -> None:
    """The second rank comes late to every layer."""
    if distributed.get_rank() == 1:
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: time.sleep(0.1))


def tensor_parallel(mesh: Any, **rowwise: Any) -> nn.Module:
    from torch.distributed.tensor import parallel

    model = Tower()
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel(**rowwise)}
    return parallel.parallelize_module(model, mesh, plan)


def sharded(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Tower()
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return model


def models(mesh: Any) -> dict[str, Callable[[], nn.Module]]:
    from torch.distributed.tensor import Replicate

    return {
        "rowwise": lambda: tensor_parallel(mesh),
        "dtensor": lambda: tensor_parallel(
            mesh, output_layouts=Replicate(), use_local_output=False
        ),
        "fsdp2": lambda: sharded(mesh),
        "by_hand": Reduced,
    }


def one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS
    )
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        for name, make in models(mesh).items():
            model = make()
            slow_on_rank_1(model)
            for keep in ("tensors", "summary"):
                record = partial(tap.record, keep=keep, **EVERYTHING)
                with in_turn(record, model, folder / f"{name}-{keep}"):
                    backward(model(data().requires_grad_()))
            with in_turn(partial(tap.watch, layers="all"), model, folder / f"{name}-watched"):
                model(data())
    finally:
        distributed.destroy_process_group()


@contextmanager
def in_turn(start: Callable[..., Any], model: nn.Module, path: Path) -> Iterator[None]:
    """One folder for all ranks: rank 0 makes it, the others join."""
    for rank in range(RANKS):
        if distributed.get_rank() == rank:
            opened = start(model, path, overwrite=True)
            opened.__enter__()
        distributed.barrier()
    yield
    distributed.barrier()
    opened.__exit__(None, None, None)
    distributed.barrier()


def backward(output: Any) -> None:
    tensors = output.values() if isinstance(output, dict) else [output]
    sum((t.to_local() if hasattr(t, "to_local") else t).square().sum() for t in tensors).backward()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks recorded of each model, beside the truth of one process."""
    path = tmp_path_factory.mktemp("ranks")
    for name in ("rowwise", "dtensor", "fsdp2", "by_hand"):
        model = Reduced() if name == "by_hand" else Tower()
        with tap.record(model, path / f"truth-{name}", **EVERYTHING):
            backward(model(data().requires_grad_()))
    torch.multiprocessing.spawn(one_rank, args=(path,), nprocs=RANKS)
    return path


EVERY = pytest.mark.parametrize(
    ("name", "layer", "tail"),
    [
        ("rowwise", "down", ""),
        ("rowwise", "", ""),
        ("dtensor", "down", ".to_local()"),
        ("dtensor", "end", ".to_local()"),
        ("fsdp2", "down", ""),
        ("by_hand", "", ""),
    ],
)


def heard(path: Path, layer: str, port: str, rank: int) -> dict[str, tap.Record]:
    """What one rank recorded of a layer's port, by leaf."""
    found = [r for r in tap.open(path)[layer].records if r.port == port and r.rank == rank]
    assert len({r.leaf for r in found}) == len(found)
    return {r.leaf: r for r in found}


@EVERY
@pytest.mark.parametrize("rank", range(RANKS))
def test_every_rank_records_the_whole_sum(
    folder: Path, name: str, layer: str, tail: str, rank: int
) -> None:
    truth = heard(folder / f"truth-{name}", layer, "output", 0)
    found = heard(folder / f"{name}-tensors", layer, "output", rank)
    assert set(found) == {leaf + tail for leaf in truth}
    for leaf, expected in truth.items():
        torch.testing.assert_close(found[leaf + tail].tensor(), expected.tensor())


@EVERY
@pytest.mark.parametrize("how", ["summary", "watched"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_summaries_are_of_the_whole_sum(
    folder: Path, name: str, layer: str, tail: str, how: str, rank: int
) -> None:
    truth = heard(folder / f"truth-{name}", layer, "output", 0)
    found = heard(folder / f"{name}-{how}", layer, "output", rank)
    for leaf, expected in truth.items():
        assert found[leaf + tail].summary.l2 == pytest.approx(expected.summary.l2, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "layer", "port", "tail"),
    [
        ("rowwise", "end", "input", ""),
        ("dtensor", "end", "input", ".to_local()"),
        ("rowwise", "down", "grad_output", ""),
        ("rowwise", "", "grad_input", ""),
        ("fsdp2", "down", "grad_output", ""),
        ("fsdp2", "", "grad_input", ""),
    ],
)
@pytest.mark.parametrize("rank", range(RANKS))
def test_inputs_and_gradients_are_the_whole_ones(
    folder: Path, name: str, layer: str, port: str, tail: str, rank: int
) -> None:
    (expected,) = heard(folder / f"truth-{name}", layer, port, 0).values()
    found = heard(folder / f"{name}-tensors", layer, port, rank)
    torch.testing.assert_close(found[tail].tensor(), expected.tensor())
