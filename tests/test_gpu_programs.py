"""Compiled models on a CUDA device record what the eager model does there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import tensortap as tap
from programs.models import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _on_gpu(name: str) -> tuple[Any, Any, Any]:
    model, args, kwargs = MODELS[name]()
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.cuda(), (args, kwargs))
    return model.cuda(), args, kwargs


def _record(model: Any, path: Path, args: Any, kwargs: Any) -> tap.Recording:
    with torch.no_grad(), tap.record(model, path, layers="all", overwrite=True) as recorder:
        recorder.run(*args, **kwargs)
    return tap.open(path)


def _compile(kind: str, model: Any, args: Any, kwargs: Any, folder: Path) -> Any:
    with torch.no_grad():
        if kind == "trace":
            return torch.jit.trace(
                model,
                args or None,
                example_kwarg_inputs=kwargs or None,
                strict=False,
                check_trace=False,
            )
        exported = torch.export.export(model, args, kwargs, strict=False)
        torch.export.save(exported, folder / "model.pt2")
        return folder / "model.pt2"


@pytest.mark.parametrize("kind", ["trace", "export"])
@pytest.mark.parametrize("name", ["demo", "llama", "mamba"])
def test_every_layer_is_the_eager_one(name: str, kind: str, tmp_path: Path) -> None:
    model, args, kwargs = _on_gpu(name)
    eager = _record(model, tmp_path / "eager", args, kwargs)
    compiled = _compile(kind, model, args, kwargs, tmp_path)
    found = _record(compiled, tmp_path / kind, args, kwargs)
    assert all(check["passed"] for check in found.manifest.self_checks)
    assert any(record.device.startswith("cuda") for record in found.records)
    result = tap.compare(eager, found)
    compared = [row for row in result.layers if row.verdict != "missing"]
    assert len(compared) >= 0.9 * len(eager.layers)
    assert {row.verdict for row in compared} == {"identical"}, result.sentence
