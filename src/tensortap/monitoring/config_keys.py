"""The keys of a configuration file, and what each of them may be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import OptionError
from ..sizes import parse_size
from .conditions import Action
from .rules import Rules

__all__ = ["KEYS", "Wrong"]


class Wrong(Exception):
    """A value of the wrong kind: what it must be, what was got, and of what part of the key."""

    def __init__(self, expected: str, got: object, part: str = "") -> None:
        shown = repr(got)
        super().__init__(f"{expected}, got {shown if len(shown) < 80 else shown[:77] + '…'}")
        self.part = part


def _whole(least: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # as in JSON schema, 10.0 is a whole number
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Wrong(f"a whole number from {least}", value)
        return value

    return check


def _size(value: Any) -> int:
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except OptionError:
            raise Wrong('a number of bytes, or a text such as "64MiB"', value) from None
    return _whole(1)(value)


def _wholes(some: bool) -> Callable[[Any], list[int]]:
    def check(value: Any) -> list[int]:
        expected = "a list of whole numbers from 0" + (", and not empty" if some else "")
        if not isinstance(value, list | tuple) or (some and not value):
            raise Wrong(expected, value)
        try:
            return [_whole(0)(item) for item in value]
        except Wrong:
            raise Wrong(expected, value) from None

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Wrong("true or false", value)
    return value


def _text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)  # from a mapping in Python
    if not isinstance(value, str) or not value:
        raise Wrong("a text, and not empty", value)
    return value


def _choice(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise Wrong(" or ".join(f'"{choice}"' for choice in choices), value)
        return value

    return check


def _patterns(value: Any, expected: str = "a pattern or a list of patterns") -> str | list[str]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) and v for v in value):
        return list(value)
    raise Wrong(expected, value)


def _params(value: Any) -> bool | str | list[str]:
    if isinstance(value, bool):
        return value
    return _patterns(value, "true, false, a pattern or a list of patterns")


def _updates(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value == "sampled"):
        return value
    raise Wrong('true, false or "sampled"', value)


def _monitored(value: Any) -> list[str] | dict[str, dict[str, Any]]:
    if isinstance(value, list | tuple) and all(isinstance(layer, str) for layer in value):
        return list(value)
    if isinstance(value, Mapping) and all(isinstance(layer, str) for layer in value):
        return {layer: _layer(layer, told) for layer, told in value.items()}
    raise Wrong("a list of layers, or an object with a configuration for each", value)


def _layer(layer: str, told: Any) -> dict[str, Any]:
    expected = "an object with alias, record_type and leaf, each optional"
    if told is None:
        return {}
    if not isinstance(told, Mapping):
        raise Wrong(expected, told, f"the layer '{layer}'")
    if any(key not in _LAYER for key in told):
        quoted = ' (in TOML a name with dots is quoted: [monitor_layers."a.b"])'
        raise Wrong(expected + quoted, dict(told), f"the layer '{layer}'")
    made = {}
    for key, check in _LAYER.items():
        if told.get(key) is not None:
            try:
                made[key] = check(told[key])
            except Wrong as wrong:
                wrong.part = f"the {key} of the layer '{layer}'"
                raise
    return made


def _leaf(value: Any) -> str | int:
    if isinstance(value, str) and value:
        return value
    try:
        return _whole(0)(value)
    except Wrong:
        raise Wrong('a leaf, as "[0]", or the number of an item', value) from None


def _rules(value: Any) -> list[str] | dict[str, Action]:
    if isinstance(value, Mapping) and None not in value.values():
        Rules(value)
        return dict(value)
    if isinstance(value, list | tuple) and all(isinstance(text, str) for text in value):
        Rules(value)
        return list(value)
    raise Wrong("a list of rules, or an object from rules to actions", value)


_LAYER: dict[str, Callable[[Any], Any]] = {
    "alias": _text,
    "record_type": _choice("single", "epoch_full"),
    "leaf": _leaf,
}

KEYS: dict[str, Callable[[Any], Any]] = {
    "monitor_layers": _monitored,
    "monitor_epochs": _wholes(True),
    "monitor_batches": _wholes(False),
    "monitor_output_dir": _text,
    "monitor_save_format": _choice("pt", "npy"),
    "monitor_sample_every": _whole(1),
    "monitor_memory_limit": _size,
    "watch_layers": _patterns,
    "watch_every": _whole(1),
    "watch_outputs": _flag,
    "watch_grads": _flag,
    "watch_params": _params,
    "watch_updates": _updates,
    "watch_rules": _rules,
    "watch_path": _text,
    "watch_ring": _whole(0),
}
