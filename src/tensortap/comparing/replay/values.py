"""Values as Python source: what a script can hold without the program that made them.

Everything that goes into the text is either a literal of Python, written by `repr`, or a dotted
name that was looked up and found to be the very object. Nothing from a recording is pasted in.
"""

from __future__ import annotations

import enum
import importlib.util
import inspect
import keyword
import math
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["CannotWrite", "Source", "is_name"]

_FLAT = (type(None), bool, int, str)
_PACKAGES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib")
)
# Names that the script has for something else.
_TAKEN = frozenset(
    [
        *("build", "call", "outputs", "main", "load", "make", "fill", "config"),
        *("layer", "tensors", "torch", "sys", "Path", "load_file"),
    ]
)
_OURS = __name__.partition(".")[0]


class CannotWrite(Exception):
    """This cannot be said in a script; the message is the reason."""


def is_name(text: str) -> bool:
    """Whether a text can stand as a name in Python."""
    return text.isidentifier() and not keyword.iskeyword(text)


@dataclass
class Source:
    """The head of a script: what it imports, from where, and the configs that it holds."""

    imports: dict[str, None] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # path -> the name its module gets
    folders: dict[str, None] = field(default_factory=dict)
    configs: dict[str, tuple[str, Any, str | None]] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _short: dict[str, str] = field(default_factory=dict)

    def named(self, thing: Any) -> str:
        """The expression that leads to a class or function, by way of an import."""
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        path = getattr(thing, "__qualname__", "")
        if module is None or not path or not all(map(is_name, path.split("."))):
            raise CannotWrite(f"{path or thing!r} is made inside a function, not in a module")
        found: Any = module
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not thing:
            raise CannotWrite(f"{module.__name__}.{path} is another object by now")
        if module.__name__ == "torch" or module.__name__.startswith("torch."):
            short = _in_torch(thing)
            if short:
                return short
        home, imported = self._home(module)
        head = path.partition(".")[0]
        if imported and head not in _TAKEN and self._short.setdefault(head, home) == home:
            self.imports[f"from {home} import {head}"] = None
            return path
        if imported:
            self.imports[f"import {home}"] = None
        return f"{home}.{path}"

    def _home(self, module: ModuleType) -> tuple[str, bool]:
        """The name under which the script has a module, and whether by a plain import."""
        name = module.__name__
        if name.partition(".")[0] == _OURS:
            raise CannotWrite(f"{name} is part of tensortap, which the script must do without")
        file = getattr(module, "__file__", None)
        if name == "__main__":
            raise CannotWrite("its class is part of the program that is running")
        if file is None or _installed(str(Path(file).resolve())):
            return name, True
        path = Path(file).resolve()
        depth = name.count(".")
        root = path.parents[depth] if depth < len(path.parents) else None
        if root is not None and _would_find(name, path, root):
            self.folders[str(root)] = None
            return name, True
        return self.files.setdefault(str(path), f"own{len(self.files) or ''}"), False

    def value(self, value: Any, where: str) -> str:
        """An expression that makes a value; `where` names it, for tensors and for complaints."""
        if isinstance(value, enum.Enum):
            return f"{self.named(type(value))}[{value.name!r}]"
        if type(value) in _FLAT:
            return repr(value)
        if isinstance(value, float):
            return repr(float(value)) if math.isfinite(value) else f"float({str(value)!r})"
        if isinstance(value, torch.Tensor):
            key = f"attributes/{where}"
            self.tensors[key] = value
            return f"tensors[{key!r}]"
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, torch.Size):
            return repr(tuple(value))
        if type(value) in (tuple, list, set):
            return self._items(value, where)
        if type(value) is dict:
            items = (
                f"{self.value(key, where)}: {self.value(item, f'{where}.{key}')}"
                for key, item in value.items()
            )
            return f"{{{', '.join(items)}}}"
        if inspect.isclass(value) or inspect.isroutine(value):
            return self.named(value)
        if callable(getattr(value, "to_dict", None)) and hasattr(type(value), "from_dict"):
            return self._config(value)
        raise CannotWrite(f"{where} is a {type(value).__name__}")

    def _items(self, value: tuple[Any, ...] | list[Any] | set[Any], where: str) -> str:
        inside = [self.value(item, f"{where}.{at}") for at, item in enumerate(value)]
        if isinstance(value, tuple):
            return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(inside)}]"
        return f"{{{', '.join(inside)}}}" if inside else "set()"

    def _config(self, config: Any) -> str:
        """A config as transformers has them: its class, and its values as JSON."""
        kind = self.named(type(config))
        values = {key: item for key, item in config.to_dict().items() if _plain(item)}
        chosen = getattr(config, "_attn_implementation", None)
        made = (kind, values, chosen if isinstance(chosen, str) else None)
        for name, known in self.configs.items():
            if known == made:
                return name
        name = f"config{len(self.configs) or ''}"
        self.configs[name] = made
        return name


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    return (
        value is None
        or isinstance(value, bool | int | str)
        or (isinstance(value, float) and math.isfinite(value))
    )


def _in_torch(thing: Any) -> str:
    """`torch.nn.Linear` rather than `torch.nn.modules.linear.Linear`."""
    for home in (torch.nn, torch.nn.functional, torch):
        name = getattr(thing, "__name__", "")
        if getattr(home, name, None) is thing:
            return f"{home.__name__}.{name}"
    return ""


def _installed(path: str) -> bool:
    return any(path.startswith(f"{folder}/") for folder in _PACKAGES)


def _would_find(name: str, path: Path, root: Path) -> bool:
    """Whether `import name` with this folder on the path finds this very file."""
    if not all(map(is_name, name.split("."))) or path != root.joinpath(
        *name.split(".")
    ).with_suffix(".py"):
        return False
    inner = [root.joinpath(*name.split(".")[:n]) for n in range(1, name.count(".") + 1)]
    known = importlib.util.find_spec(name.partition(".")[0])
    foreign = known is not None and known.origin is not None and _installed(known.origin)
    return all((folder / "__init__.py").is_file() for folder in inner) and not foreign
