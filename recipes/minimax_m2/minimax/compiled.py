"""The compiled model: one TorchScript file with taps in it, kept, and proven against eager.

A trace writes down what ran. Of a mixture of experts that must not be the experts that the first
prompt happened to choose: `grouped_mm`, transformers' default, sorts the tokens by expert and
multiplies group by group, with the groups' ends as a tensor, so the choice stays in the graph. That
it does is not taken on trust: the file is run on two more prompts, one that meets many experts and
one that meets few, and each layer must be what the eager model computes on them.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, jit

import tensortap as tap
from tensortap.errors import OptionError, TargetError
from tensortap.taps.programs.opaque.manifest import Manifest, digest, manifest_path

from .model import LAYERS, Chosen, experts_of

__all__ = ["Artefact", "compile_model", "find_compiled", "interpreted"]

_JIT: Any = jit  # untyped in torch
_CLOSE = 1e-5
_SECOND = 20_011  # the seed of the second prompt
_UNLIKE = "The compiled model does not compute what the eager one does:"
_BAKED = (
    "What the model does depends on its input in a way that a trace cannot hold; record it eagerly "
    "with test_layer_by_layer_gpu.py."
)


@dataclass(frozen=True)
class Artefact:
    """A compiled model: its file, the layers that it returns, and what the model says of itself."""

    script: Any
    file: Path
    layers: tuple[str, ...]
    config: dict[str, Any]
    weights: str

    @property
    def manifest(self) -> Path:
        return manifest_path(self.file)


def compile_model(wanted: Chosen, target: tap.Target, folder: Path) -> Artefact:
    """Compile the model with a tap on each layer, prove it, and keep it in the folder."""
    from tensortap.taps.instrument.write import ModuleSource, write

    folder.mkdir(parents=True, exist_ok=True)
    file, about = _file(folder), _about(folder)
    about.unlink(missing_ok=True)  # what is half made is not to be reused
    model, batch = target.model, target.batches[0]
    _keep_the_choice(model)
    written = write(ModuleSource(model, (), batch.kwargs, list(LAYERS)), file, overwrite=True)
    script = _JIT.load(str(file))
    _prove(model, script, batch.kwargs["input_ids"])
    weights = target.notes[0] if target.notes else str(wanted.checkpoint)
    known = {
        "made_for": wanted.identity(),
        "weights": weights,
        "config": target.config,
        "operators": "transformers" if _needs_transformers(file) else None,
    }
    about.write_text(json.dumps(known, indent=1) + "\n")
    return Artefact(script, file, written.manifest.layers, target.config or {}, weights)


def find_compiled(wanted: Chosen, folder: Path) -> Artefact:
    """The artefact that an earlier command made for the same model and sequence length."""
    again = "Run the command once without --skip-compile."
    file, about = _file(folder), _about(folder)
    if not (file.is_file() and about.is_file() and manifest_path(file).is_file()):
        raise OptionError(f"There is no compiled model in '{folder}'. {again}")
    try:
        known = json.loads(about.read_text())
        made_for, config, weights = known["made_for"], known["config"], known["weights"]
        had = (made_for["seq_len"], made_for["model"], made_for["versions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetError(f"'{about}' is damaged. {again}") from error
    asked = wanted.identity()
    if had[0] != asked["seq_len"]:
        raise OptionError(
            f"The compiled model takes sequences of {had[0]} tokens, and --seq-len is "
            f"{asked['seq_len']}. {again}"
        )
    if had[1] != asked["model"]:
        there, here = _told(had[1]), _told(asked["model"])
        what = f"{there}, and not {here}" if there != here else f"{here} with other settings"
        raise OptionError(f"The compiled model was made of another model: {what}. {again}")
    if had[2] != asked["versions"]:
        there, here = (
            " and ".join(f"{name} {version}" for name, version in sorted(versions.items()))
            for versions in (had[2], asked["versions"])
        )
        raise OptionError(f"The compiled model was made with {there}, and here is {here}. {again}")
    if known.get("operators"):
        import transformers.integrations.moe  # noqa: F401  (the file calls an operator of it)
    manifest = Manifest.load(manifest_path(file))
    if [part.digest for part in manifest.parts] != [digest(file)]:
        raise TargetError(f"'{file}' is another file than the one its manifest is of. {again}")
    try:
        script = _JIT.load(str(file))
    except RuntimeError as error:
        raise TargetError(f"'{file}' cannot be loaded: {_line(error)} {again}") from error
    return Artefact(script, file, manifest.layers, config, str(weights))


@contextmanager
def interpreted() -> Iterator[None]:
    """Run TorchScript without optimising it first, which takes longer than a few runs gain."""
    with _JIT.optimized_execution(False), torch.no_grad():
        yield


def _file(folder: Path) -> Path:
    return folder / "minimax_m2.pt"


def _about(folder: Path) -> Path:
    return folder / "minimax_m2.json"


def _told(model: dict[str, Any]) -> str:
    if "checkpoint" in model:
        return f"{model['checkpoint']} ({str(model.get('files'))[:8]})"
    hidden = model.get("settings", {}).get("hidden_size")
    return f"seeded random weights (seed {model.get('seed')}, hidden {hidden})"


def _keep_the_choice(model: Any) -> None:
    """Experts that loop over the chosen ones would be traced with the choice of one prompt."""
    if experts_of(model) == "eager":
        with suppress(ValueError):  # a model without experts, or whose experts have one way alone
            model.set_experts_implementation("grouped_mm")


def _prove(model: Any, script: Any, ids: Tensor) -> None:
    """The artefact computes what eager does, on the prompt and on two quite other ones."""
    size = model.get_input_embeddings().num_embeddings
    other = torch.randint(
        size, ids.shape, generator=torch.Generator().manual_seed(_SECOND), dtype=ids.dtype
    )
    wrapped = tap.instrument(model, list(LAYERS))
    few = other[:, :1].expand_as(other).clone()  # one token again and again meets few experts
    prompts = {"the prompt": ids, "a prompt of random tokens": other, "one token repeated": few}
    for what, prompt in prompts.items():
        with interpreted():
            _, expected = wrapped(input_ids=prompt)
            try:
                _, got = script(prompt)
            except RuntimeError as error:  # TorchScript's own complaint is in its last line
                last = (str(error).strip().splitlines() or ["no message"])[-1]
                raise TargetError(
                    f"{_UNLIKE} on {what} it fails with '{last}'. {_BAKED}"
                ) from error
        for entry, a, b in zip(wrapped.manifest.entries, expected, got, strict=True):
            if not _alike(a, b):
                off = float((a.double() - b.double()).abs().max()) if a.shape == b.shape else 0
                raise TargetError(
                    f"{_UNLIKE} on {what} '{entry.layer}' is off by up to {off:.3g}. {_BAKED}"
                )


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    off = (a.double() - b.double()).abs()
    finite = off[off.isfinite()]
    same_kind = torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
    largest = a.double()[a.isfinite()].abs()
    allowed = _CLOSE * float(largest.max()) if largest.numel() else 0.0
    return same_kind and (not finite.numel() or float(finite.max()) <= allowed)


def _needs_transformers(file: Path) -> bool:
    """Whether the graph calls an operator that transformers brings (older torch on a CPU)."""
    with zipfile.ZipFile(file) as parts:
        code = (name for name in parts.namelist() if name.endswith(".py"))
        return any(b"ops.transformers" in parts.read(name) for name in code)


def _line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or ["no message"])[0]
    return line if line.endswith(".") else f"{line}."
