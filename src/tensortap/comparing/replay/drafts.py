"""The text of a script that replays a layer, from its parts."""

from __future__ import annotations

import pprint
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .calls import Arguments, access
from .template import FILL, LOAD, MAIN, MAKE
from .values import CannotWrite, Source, is_name

__all__ = ["Draft", "drafted"]

_WIDTH = 96


@dataclass(frozen=True)
class Draft:
    """A script, the tensors beside it, and a program where the layer has no source."""

    text: str
    tensors: dict[str, torch.Tensor]
    program: Any = None


def drafted(
    source: Source,
    *,
    head: Sequence[str],
    body: Sequence[str],
    given: Arguments,
    expected: Mapping[str, torch.Tensor],
    tolerance: Mapping[str, float],
    device: str,
    makes: bool,
    fills: bool,
    program: Any,
) -> Draft:
    """Put a script together; `body` makes the layer, `given` is what it is called with."""
    call = _call(source, given)
    reached = {leaf: access(leaf) for leaf in expected}
    places = {f"output{leaf}": f"output{way}" for leaf, way in reached.items() if way is not None}
    if not places:
        raise CannotWrite("its output has no tensor that a script could name")
    wanted = {name: expected[name.removeprefix("output")] for name in places}
    blocks = [
        [*_docstring(head, source), "", *_imports(source)],
        [LOAD] if source.files else [],
        [f"{name} = load({path!r})" for path, name in source.files.items()],
        [MAKE] if makes else [],
        [FILL] if fills else [],
        _function("build(tensors)", [*_configs(source), *body]),
        _function("call(layer, tensors)", [f"return {call}"]),
        _function("outputs(output)", [f"return {_mapping(places)}"]),
        [MAIN],
    ]
    limits = {name: float(f"{tolerance[name.removeprefix('output')]:.3g}") for name in places}
    blocks[0] += [
        "",
        f"DEVICE = {device!r}",
        f"TOLERANCE = {limits!r}  # relative L2 errors, by output",
    ]
    text = "\n\n\n".join("\n".join(block).strip("\n") for block in blocks if block) + "\n"
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in (source.tensors | wanted).items()
    }
    return Draft(text, tensors, program)


def _docstring(head: Sequence[str], source: Source) -> list[str]:
    first, *rest = [_wrapped(_harmless(text)) for text in (*head, *_needs(source))]
    return [f'"""{first[0]}', *first[1:], "", *(line for text in rest for line in text), '"""']


def _wrapped(text: str) -> list[str]:
    """Lines of bearable length; a path stays whole."""
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False, break_long_words=False)


def _needs(source: Source) -> list[str]:
    packages = {line.split()[1].partition(".")[0] for line in source.imports}
    standard = sys.stdlib_module_names
    *names, last = ["torch", *sorted(packages - {"torch", *standard}), "safetensors"]
    own = [*source.files, *source.folders]
    found = f"Needs {', '.join(names)} and {last}"
    where = f"; reads the layer's class from {' and '.join(own)}" if own else ""
    return [f"{found}{where}."]


def _harmless(text: str) -> str:
    """A text that can stand in a docstring, whatever names from a file are in it."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return plain.replace("\\", "/").replace('"', "'")


def _imports(source: Source) -> list[str]:
    standard = ["import sys", "from pathlib import Path"]
    if source.files:
        standard.insert(0, "import importlib.util")
    third = ["import torch", "from safetensors.torch import load_file"]
    folders = [f"sys.path.insert(0, {folder!r})" for folder in source.folders]
    own = [line for line in source.imports if line.startswith("import ")]
    homes: dict[str, list[str]] = {}
    for line in source.imports:
        if line.startswith("from "):
            _, home, _, name = line.split()
            homes.setdefault(home, []).append(name)
    own += [f"from {home} import {', '.join(names)}" for home, names in sorted(homes.items())]
    return [*standard, "", *third, *([""] if own or folders else []), *folders, *own]


def _configs(source: Source) -> list[str]:
    lines = []
    for name, (kind, values, attention) in source.configs.items():
        held = pprint.pformat(values, width=_WIDTH - 8, sort_dicts=False)
        lines += [f"{name} = {kind}.from_dict(", textwrap.indent(held, "    "), ")"]
        if attention is not None:
            lines.append(f"{name}._attn_implementation = {attention!r}")
    return lines


def _function(head: str, body: Sequence[str]) -> list[str]:
    return [f"def {head}:", *(textwrap.indent(line, "    ") for line in body)]


def _call(source: Source, given: Arguments) -> str:
    """The call as source text; its tensors go to the file under the names of their places."""
    inside = [_argument(source, value, f"args[{at}]") for at, value in enumerate(given.args)]
    for name, value in given.kwargs.items():
        if not is_name(name):
            raise CannotWrite(f"its argument {name!r} has a name that Python has not")
        try:
            inside.append(f"{name}={_argument(source, value, f'kwargs[{name!r}]')}")
        except CannotWrite:
            continue  # a cache, a function: whether it is needed shows when the script is tried
    flat = f"layer({', '.join(inside)})"
    if len(flat) < _WIDTH - 12:
        return flat
    return "layer(\n    " + ",\n    ".join(inside) + ",\n)"


def _argument(source: Source, value: Any, key: str) -> str:
    if isinstance(value, torch.Tensor):
        source.tensors[key] = value
        return f"tensors[{key!r}]"
    if type(value) in (tuple, list):
        inside = [_argument(source, item, f"{key}[{at}]") for at, item in enumerate(value)]
        if isinstance(value, list):
            return f"[{', '.join(inside)}]"
        return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
    if type(value) is dict:
        return _mapping(
            {name: _argument(source, item, f"{key}[{name!r}]") for name, item in value.items()}
        )
    return source.value(value, key)


def _mapping(items: Mapping[Any, str]) -> str:
    return f"{{{', '.join(f'{key!r}: {text}' for key, text in items.items())}}}"
