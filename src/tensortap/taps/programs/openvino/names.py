"""What the names of an OpenVINO graph say of the modules that its operations come from.

| converted from | an operation's friendly name |
|---|---|
| a torch module | `__module.layers.0.mlp.down_proj/aten::linear/MatMul_1` |
| ONNX, torch's older exporter | `/layers.0/mlp/down_proj/MatMul_1` |
| an exported program, ONNX of torch's newer exporter, a scripted module | no module |

The older ONNX exporter writes a module's second call as another module, `relu_1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Spot", "best_name", "parse", "parse_values", "weight_name"]

_TORCH = re.compile(r"(?:__module\.([^/]+)/)?(\w+::.+)")
_NUMBER = re.compile(r"(.*?)_(\d+)")
_VALUE = re.compile(r"_output_\d+$")
_BIAS = "/WithoutBiases"


@dataclass(frozen=True)
class Spot:
    """Where an operation was written: in which module, by what, the how manyth of its kind.

    `repeats`: all calls of a module go by one path, and only the numbers tell them apart.
    """

    path: str
    kind: str
    number: int
    repeats: bool = True


def parse(name: str) -> Spot | None:
    """The spot that a friendly name tells, "" being the root, or None where it tells of none."""
    torch = _TORCH.fullmatch(name)
    if torch is not None:
        path, what = torch.groups()
        return Spot(path or "", *_numbered(what))
    if not name.startswith("/"):
        return None
    parts = name.removesuffix(_BIAS).split("/")[1:]
    if not all(parts):
        return None
    inside = "/WithoutBiases" if name.endswith(_BIAS) else ""
    kind, number = _numbered(parts[-1])
    return Spot(_onnx_path(parts[:-1]), kind + inside, number, repeats=False)


def parse_values(names: Iterable[str]) -> tuple[Spot | None, bool]:
    """The spot that ONNX's names of a value tell, and whether they tell of several modules.

    Where the last operations of a layer do nothing (a gain of ones, a bias of zeros) OpenVINO
    leaves them out: the value keeps its name, but the operation that now makes it has none.
    """
    spots = [spot for name in names if (spot := parse(_VALUE.sub("", name))) is not None]
    if len({spot.path for spot in spots}) > 1:
        return None, True
    return (spots[0], False) if spots else (None, False)


def _numbered(what: str) -> tuple[str, int]:
    found = _NUMBER.fullmatch(what)
    return (what, 0) if found is None else (found[1], int(found[2]))


def _onnx_path(scopes: list[str]) -> str:
    """The dotted path: a scope repeats its container's name, as in `/blk/blk.0`, or holds it."""
    path = ""
    for scope in scopes:
        last = path.rpartition(".")[2]
        if last and scope.startswith(f"{last}."):
            scope = scope[len(last) + 1 :]
        path = f"{path}.{scope}" if path else scope
    return path


def weight_name(name: str) -> str | None:
    """The parameter that a constant's friendly name tells, or None."""
    name = name.removesuffix("_compressed")
    if name.startswith("self."):
        return name[5:]
    if "/" in name or ":" in name or "." not in name:
        return None
    return name


def best_name(names: Iterable[str]) -> str | None:
    """Of the names that a value goes by, the one a person would use."""
    found = sorted(names, key=lambda name: (not name[:1].isalpha(), len(name), name))
    return found[0] if found else None
