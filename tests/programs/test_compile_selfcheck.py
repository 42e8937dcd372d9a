"""`torch.compile` keeps its hooks; where inputs are recorded too, its linears are checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tensortap as tap


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).eval()


def _checks(
    model: nn.Module,
    path: Path,
    inputs: bool = True,
    backend: Any = "aot_eager",
    keep: Any = "tensors",
) -> dict[str, bool]:
    compiled = torch.compile(model, backend=backend)
    options: dict[str, Any] = {"layers": "all", "inputs": inputs, "keep": keep}
    with torch.no_grad(), tap.record(compiled, path, **options) as recorder:
        recorder.run(torch.randn(3, 4))
        recorder.run(torch.randn(3, 4))
    run = tap.open(path)
    assert run.manifest.target["runtime"] == "torch.compile"
    return {check["layer"]: check["passed"] for check in run.manifest.self_checks}


def test_linears_of_a_compiled_model_are_checked(tmp_path: Path) -> None:
    assert _checks(_model(), tmp_path / "run") == {"0": True, "2": True}
    assert _checks(_model(), tmp_path / "sums", keep="summary") == {"0": True, "2": True}


class _Breaks(nn.Module):
    """Looks at its values as it runs, so that its graph breaks in the middle of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self.a(x)
            x = self.b(x) * 0.5 if bool(x.sum() > 0) else x - 1
        return x


def test_calls_whose_graph_breaks_keep_their_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _Breaks().eval(), torch.randn(4, 4)
    runs = []
    for name, one in (("eager", model), ("compiled", torch.compile(model, backend="eager"))):
        with torch.no_grad(), tap.record(one, tmp_path / name, layers="all", inputs=True) as rec:
            rec.run(x, 5)
        run = tap.open(tmp_path / name)
        runs.append({(r.layer, r.port, r.call): r.tensor() for r in run.records if r.stored})
    expected, found = runs
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def test_there_is_nothing_to_check_without_inputs(tmp_path: Path) -> None:
    assert _checks(_model(), tmp_path / "run", inputs=False) == {}


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _miscompile(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """A compiler with a mistake in it: the first linear loses its bias."""
    node = next(node for node in graph.graph.nodes if node.target is nn.functional.linear)
    node.args = (*node.args[:2], None)
    graph.recompile()
    return graph.forward


def test_a_miscompiled_linear_is_found_out(tmp_path: Path) -> None:
    for name, keep in (("run", "tensors"), ("sums", "summary")):
        found = _checks(_model(), tmp_path / name, backend=_miscompile, keep=keep)
        assert found == {"0": False, "2": True}
    assert [f.layer for f in tap.open(tmp_path / "run").check()] == ["0"]


def test_a_linear_with_a_hook_of_the_users_is_not_judged(tmp_path: Path) -> None:
    model = _model()
    model[0].register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[operator]
    assert _checks(model, tmp_path / "run") == {"2": True}


def test_a_class_of_its_own_may_compute_what_it_likes(tmp_path: Path) -> None:
    model = nn.Sequential(_Doubled(4, 5), nn.Linear(5, 2)).eval()
    assert _checks(model, tmp_path / "run") == {"1": True}
