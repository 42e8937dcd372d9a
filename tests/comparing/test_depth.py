"""How many operations stand before an output: by its order of execution, call by call."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import tensortap as tap
from tensortap.comparing.depth import Depths


class Chain(nn.Module):
    """An embedding, blocks and a norm; one dropout is called at both ends."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return self.dropout(self.norm(x))


IDS = torch.arange(6).reshape(2, 3)


def depths(path: Path, layers: str | list[str], runs: int = 1) -> dict[tuple[str, int], int]:
    model = Chain().eval()
    with torch.no_grad(), tap.record(model, path, layers=layers):
        for _ in range(runs):
            model(IDS)
    recording = tap.open(path)
    found = Depths(recording)
    return {(r.layer, r.call): found.of(r) for r in recording.records if r.port == "output"}


def test_a_layer_that_is_called_twice_has_a_depth_for_each_call(tmp_path: Path) -> None:
    found = depths(tmp_path / "r", "all")
    assert found["embedding", 0] == 1
    assert found["dropout", 0] == 2
    assert found["norm", 0] > 20  # three blocks stand before it
    assert found["dropout", 1] >= found["norm", 0]


def test_blocks_stand_for_many_operations(tmp_path: Path) -> None:
    found = depths(tmp_path / "r", ["embedding", "blocks", "norm"])
    assert [found[name, 0] for name in ("embedding", "blocks.0", "blocks.2")] == [1, 10, 30]
    assert found["norm", 0] == 30


def test_blocks_that_were_not_recorded_count_too(tmp_path: Path) -> None:
    assert depths(tmp_path / "r", ["embedding", "norm"]) == {
        ("embedding", 0): 1,
        ("norm", 0): 30,
    }


def test_every_pass_begins_again(tmp_path: Path) -> None:
    for number, layers in enumerate(("all", ["embedding", "blocks", "norm"])):
        found = depths(tmp_path / str(number), layers, runs=3)
        assert found["norm", 0] == found["norm", 2]
        assert found["embedding", 2] == 1


def test_gradients_and_steps_of_training(tmp_path: Path) -> None:
    """A gradient stands behind the whole way, a weight behind the roundings of all steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.watch(model, tmp_path / "r", layers="all", every=1, grads=True, params=True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    recording = tap.open(tmp_path / "r")
    found = Depths(recording)
    at = {(r.layer, r.port, r.leaf, r.batch): found.of(r) for r in recording.records}
    records = [r for r in recording["0"].records if r.port == "grad_output"]
    first = records[0].batch
    assert at["9", "output", "", first] == 10
    assert at["0", "grad_output", "", first] >= 20  # ten layers forwards, ten back
    weights = [at["0", "param", ".weight", first + step] for step in range(4)]
    assert weights == [1, 2, 3, 4]
    growth = found.growth(records)
    assert list(growth) == [found.of(r) / found.of(records[0]) for r in records]
    assert growth[3] > growth[0] == 1
    assert at["9", "output", "", first + 3] > 3 * at["9", "output", "", first]
