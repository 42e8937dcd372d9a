"""Writes a replay as a script: the layer, its inputs, its weights, and what was to come out.

The script needs torch and safetensors, and the file or package of the layer's class where that is
not torch's own. Before it is said to be written, it is run, and must give what the layer gave.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ...errors import OptionError, RecordingExistsError, TargetError
from ...numerics.difference import difference
from ...recording.dtypes import dtype_name
from ...selection.sites import unwrap
from ...taps.isolation import unchanged
from ...taps.patching import leaves_of, put
from ...taps.plain import is_plain
from ..judge import AGAINST_ESTIMATE
from ..precision import roundoff
from ..results import LayerComparison, Part
from ..sentences import name_of
from .calls import parse_leaf
from .drafts import Draft, drafted
from .rebuild import Rebuilder
from .running import Played
from .values import CannotWrite, Source, is_name

__all__ = ["Story", "check_room", "write_script"]

_ENDINGS = (".py", ".safetensors", ".pt2")
# What a layer that was made again may be off: kernels look at where in memory a tensor lies, which
# costs a float32 some roundings, and what is rounded to 16 bits a few flips.
_ALIKE, _ALIKE_NARROW = 4.0, 0.25


@dataclass(frozen=True)
class Story:
    """What a script is to tell: a layer, one call of it, and what was found."""

    run: str
    target: str
    row: LayerComparison
    played: Played
    model: nn.Module
    module: nn.Module


def check_room(path: Path, overwrite: bool) -> list[Path]:
    """The files that may be written; what is there is not replaced unasked."""
    if path.suffix != ".py":
        raise OptionError(f"The script {str(path)!r} needs a name that ends in .py.")
    hidden = path.stem.partition(".")[0]
    if hidden in sys.modules or hidden in sys.stdlib_module_names:
        raise OptionError(
            f"A script {path.name!r} would hide the module '{hidden}' from itself, which it may "
            "import. Choose another name, as bug.py."
        )
    files = [path.with_suffix(ending) for ending in _ENDINGS]
    for file in files:
        if file.is_dir():
            raise OptionError(f"{file} is a folder. Name a file, as bug.py.")
        if file.exists() and not overwrite:
            raise RecordingExistsError(
                f"{file} is there already. Choose another name, or replace it with --overwrite "
                "(overwrite=True)."
            )
    return files


def write_script(story: Story, path: Path, overwrite: bool) -> list[Path]:
    """Write the script and its tensors; returns the files, the script first."""
    files = check_room(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    reasons: list[str] = []
    for make in (_by_constructor, _by_attributes, _by_export):
        folder = Path(tempfile.mkdtemp(prefix=".replay-", dir=path.parent))
        try:
            _try(story, make(story), folder / path.name)
            return _move(folder, files)
        except CannotWrite as reason:
            reasons.append(str(reason))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    raise TargetError(
        f"Layer '{name_of(story.row.layer)}' ({type(unwrap(story.module)).__name__}) cannot be "
        f"written as a script of its own: {'; '.join(dict.fromkeys(reasons))}."
    )


def _move(folder: Path, files: Sequence[Path]) -> list[Path]:
    written = []
    for file in files:
        made = folder / file.name
        if made.exists():
            made.replace(file)
            written.append(file)
        elif file.exists():  # of an earlier script of this name, which needed it
            file.unlink()
    return written


# Ways to make the layer again, the most readable first.


def _by_constructor(story: Story) -> Draft:
    return _from_source(story, bare=False)


def _by_attributes(story: Story) -> Draft:
    return _from_source(story, bare=True)


def _from_source(story: Story, *, bare: bool) -> Draft:
    source = Source()
    module = unwrap(story.module)
    rebuilder = Rebuilder(source, story.model, bare=bare)
    body = [
        f"layer = {rebuilder.expression(module)}",
        "fill(layer, tensors)",
        f"return layer.{'train' if module.training else 'eval'}()",
    ]
    source.tensors.update(_weights(module))
    return _drafted(story, source, body, makes=rebuilder.made_bare, fills=True)


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    named: list[tuple[str, Callable[..., Any]]] = [
        ("weights", module.named_parameters),
        ("buffers", module.named_buffers),
    ]
    for kind, listed in named:
        for name, tensor in listed(remove_duplicate=False):
            if not is_plain(tensor):
                raise CannotWrite(f"its {name} is a {type(tensor).__name__}, no plain tensor")
            yield f"{kind}/{name.replace('_orig_mod.', '')}", tensor


def _by_export(story: Story) -> Draft:
    """The layer as a program of operations: no source that one could read, the same numbers."""
    given = story.played.given
    for leaf in story.played.inputs:  # torch.export writes them into code of its own, unquoted
        if not all(isinstance(step, int) or is_name(step) for step in parse_leaf(leaf) or ()):
            raise CannotWrite(f"its input {leaf} has a name that is none in Python")
    args, kwargs = (_cloned(value) for value in (given.args, given.kwargs))
    try:
        with unchanged(story.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program: Any = torch.export.export(unwrap(story.module), args, kwargs)
    except Exception as error:  # whatever torch.export says of a user's layer
        lines = str(error).strip().splitlines() or ["no message"]
        raise CannotWrite(f"torch.export fails ({type(error).__name__}: {lines[0]})") from error
    body = ['return torch.export.load(Path(__file__).with_suffix(".pt2")).module()']
    return _drafted(story, Source(), body, program=program)


def _cloned(value: Any) -> Any:
    return put(value, {leaf: tensor.clone() for leaf, tensor in leaves_of(value).items()})


def _drafted(
    story: Story,
    source: Source,
    body: list[str],
    *,
    makes: bool = False,
    fills: bool = False,
    program: Any = None,
) -> Draft:
    leaves = [part.leaf for part in story.row.parts if part.leaf in story.played.outputs]
    recorded = story.played.recorded.outputs
    tensors = [*story.module.parameters(), *story.played.inputs.values()]
    return drafted(
        source,
        head=_head(story, program is not None),
        body=body,
        given=story.played.given,
        expected={leaf: recorded[leaf].tensor() for leaf in leaves if leaf in recorded},
        tolerance={part.leaf: _tolerance(part) for part in story.row.parts},
        device=str(tensors[0].device) if tensors else "cpu",
        makes=makes,
        fills=fills,
        program=program,
    )


def _head(story: Story, exported: bool) -> list[str]:
    row, (epoch, batch, call) = story.row, story.played.recorded.moment
    kind = type(unwrap(story.module))
    lines = [
        f"Layer {name_of(row.layer)} ({kind.__name__}) of {story.target}, alone.",
        f"Its inputs and the expected output are those of {story.run}, epoch {epoch}, "
        f"batch {batch}, call {call}; its weights those of the live model.",
        f"When this was written: {row.verdict}; {row.why}.",
        "Prints how far the output is off; exits with 1 when that is more than TOLERANCE.",
    ]
    if exported:
        lines.append("The layer was exported: the .pt2 file holds its operations and weights.")
    return lines


def _tolerance(part: Part) -> float:
    """The error that tells a good output from this one, or from a worse one if this one is good."""
    error = 0.0 if math.isnan(part.error) else part.error
    if part.verdict == "diverged":
        return min(AGAINST_ESTIMATE * (part.floor or 0.0), error / 2)
    unit = max(roundoff(part.dtype), roundoff(part.candidate_dtype))
    return max(AGAINST_ESTIMATE * (part.floor or _ALIKE * unit), 2 * error)


# Trying it.


def _try(story: Story, draft: Draft, path: Path) -> None:
    """Write a draft, run it in this process, and see whether it gives what the layer gave."""
    path.write_text(draft.text, encoding="utf-8")
    try:
        save_file(draft.tensors, path.with_suffix(".safetensors"))
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CannotWrite(f"its tensors cannot be saved ({error})") from error
    if draft.program is not None:
        torch.export.save(draft.program, path.with_suffix(".pt2"))
    names: dict[str, Any] = {"__name__": "_replay_script", "__file__": str(path)}
    before = list(sys.path)
    try:
        with unchanged(nn.Module()):
            exec(compile(draft.text, str(path), "exec"), names)
            tensors = names["load_file"](path.with_suffix(".safetensors"), device=names["DEVICE"])
            found = names["outputs"](names["call"](names["build"](tensors), tensors))
    except Exception as error:  # whatever a user's class does when it is made again
        lines = str(error).strip().splitlines() or ["no message"]
        raise CannotWrite(f"made again, it fails ({type(error).__name__}: {lines[0]})") from error
    finally:
        sys.path[:] = before
    for name, tensor in found.items():
        _compare(story.played.outputs[name.removeprefix("output")], tensor.to("cpu"))


def _compare(wanted: torch.Tensor, got: torch.Tensor) -> None:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise CannotWrite(f"made again, it returns {got.dtype} {list(got.shape)}")
    found = difference(wanted, got, percentiles=False)
    unit = roundoff(dtype_name(wanted.dtype))
    limit = unit * (_ALIKE if unit < 1e-5 else _ALIKE_NARROW)
    if not found.identical and (found.disagreeing or not found.error <= limit):
        raise CannotWrite(f"made again, it returns something else (error {found.error:.3g})")
