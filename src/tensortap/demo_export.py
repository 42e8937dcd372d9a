"""The built-in model as the files that compilers make of it, to try recording those with."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .demo import build

__all__ = ["INPUTS", "export_demo"]

INPUTS = "in.safetensors"


def export_demo(folder: Path) -> tuple[list[str], list[str]]:
    """Write every file that the installed packages can make: their names, and notes on the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    target = build()
    ids: Tensor = target.batches[0].kwargs["input_ids"]
    save_file({"input_ids": ids}, folder / INPUTS)
    made, notes = [INPUTS], []
    for name, needs, write in _WRITERS:
        missing = [package for package in needs if find_spec(package) is None]
        if missing:
            notes.append(f"{name} was not written: it needs {' and '.join(missing)}.")
            continue
        model = build(mode="bug").model if "bug" in name else target.model
        with torch.no_grad(), _quietly():
            write(model, ids, folder / name)
        made.append(name)
    return made, notes


def _trace(model: nn.Module, ids: Tensor, path: Path) -> None:
    trace: Any = torch.jit.trace  # untyped in torch
    trace(model, (ids,), check_trace=False).save(path)


def _export(model: nn.Module, ids: Tensor, path: Path) -> None:
    torch.export.save(torch.export.export(model, (ids,)), path)


def _onnx(model: nn.Module, ids: Tensor, path: Path) -> None:
    torch.onnx.export(model, (ids,), path, dynamo=True, external_data=False, verbose=False)


def _openvino(model: nn.Module, ids: Tensor, path: Path) -> None:
    import openvino

    openvino.save_model(
        openvino.convert_model(model, example_input=ids), path, compress_to_fp16=False
    )


_Write = Callable[[nn.Module, Tensor, Path], None]
_WRITERS: tuple[tuple[str, tuple[str, ...], _Write], ...] = (
    ("traced.pt", (), _trace),
    ("traced_bug.pt", (), _trace),
    ("model.pt2", (), _export),
    ("model.onnx", ("onnx", "onnxscript"), _onnx),
    ("model.xml", ("openvino",), _openvino),
)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What exporters print and warn of is for those who write exporters."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
