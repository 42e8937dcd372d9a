"""The language of patterns: splitting a string, and telling whether a name matches."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from ..errors import SelectionError
from .sites import Site

__all__ = ["WORDS", "Matcher", "matcher", "missing_numbers", "split"]

WORDS = ("all", "leaves", "blocks", "first", "last", "embedding", "final_norm")
Matcher = Callable[[Site], bool]

_OPEN, _CLOSE = "{[(", "}])"
_RANGE = re.compile(r"(\d+)-(\d+)")
_BRACES = re.compile(r"\{([^{}]*)\}")


def split(text: str) -> list[str]:
    """Cut a string at its commas, but not at those inside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        if letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth = max(0, depth - 1)
        elif letter == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    if len(parts) > 1 and not all(parts):
        raise SelectionError(
            f"The selection {text!r} has an empty pattern between its commas. Take out the "
            "comma; the root module is selected by the word 'all' or by an empty string alone."
        )
    return parts


def matcher(pattern: str, names: Iterable[str]) -> Matcher:
    """A test for `re:…`, `type:…`, and globs with ranges; `names` are those of the model."""
    if pattern.startswith("re:"):
        return _regex(pattern[3:])
    if pattern.startswith("type:"):
        return _types(pattern[5:])
    test = re.compile(_glob(pattern, names))
    return lambda site: any(test.fullmatch(name) for name in site.names)


def missing_numbers(pattern: str, names: Sequence[str]) -> list[str]:
    """The numbers of a pattern's one range at which the model has nothing."""
    braces = _BRACES.findall(pattern)
    if len(braces) != 1 or pattern.startswith(("re:", "type:")):
        return []
    test = re.compile(_glob(pattern, names))
    matches = [match for name in names if (match := test.fullmatch(name))]
    there = {_plain(match.group(1)) for match in matches}
    return [item for item in _wanted(braces[0]) if item not in there]


def _plain(text: str) -> str:
    return str(int(text)) if text.isdecimal() else text


def _wanted(items: str, limit: int = 1024) -> list[str]:
    wanted: list[str] = []
    for item in map(str.strip, items.split(",")):
        if match := _RANGE.fullmatch(item):
            low, high = map(int, match.groups())
            wanted += [str(number) for number in range(low, min(high, low + limit) + 1)]
        elif not {"*", "?"} & set(item):
            wanted.append(_plain(item))
    return wanted


def _regex(text: str) -> Matcher:
    try:
        test = re.compile(text)
    except re.error as error:
        raise SelectionError(
            f"'re:{text}' is not a regular expression: {error}. It has to match a whole name."
        ) from error
    return lambda site: any(test.fullmatch(name) for name in site.names)


def _types(text: str) -> Matcher:
    wanted = [text]
    for braces, choices in zip(_BRACES.finditer(text), _choices(text, ()), strict=True):
        wanted = [w.replace(braces.group(), choice, 1) for w in wanted for choice in choices]

    def test(site: Site) -> bool:
        classes = [c for c in type(site.module).__mro__ if issubclass(c, nn.Module)]
        names = {c.__name__ for c in classes} | {f"{c.__module__}.{c.__name__}" for c in classes}
        names.add(site.type)
        return any(fnmatch.fnmatchcase(name, want) for name in names for want in wanted)

    return test


def _choices(pattern: str, names: Iterable[str]) -> list[list[str]]:
    """What stands in each pair of braces.

    A range takes the numbers that occur in the model, so it may reach far beyond it.
    """
    if "{" in _BRACES.sub("", pattern) or "}" in _BRACES.sub("", pattern):
        raise SelectionError(
            f"The pattern {pattern!r} has a brace without its partner. "
            "Write a range as in 'model.layers.{0,4-7}'."
        )
    found = []
    for braces in _BRACES.findall(pattern):
        numbers = {number for name in names for number in re.findall(r"\d+", name)}
        choices: list[str] = []
        for item in map(str.strip, braces.split(",")):
            if not item:
                raise SelectionError(
                    f"The pattern {pattern!r} has an empty item in its braces. "
                    "Write a range as in 'model.layers.{0,4-7}'."
                )
            span = _RANGE.fullmatch(item)
            if span is None:
                choices.append(item)
                continue
            low, high = int(span.group(1)), int(span.group(2))
            if low > high:
                raise SelectionError(
                    f"The range {item!r} in {pattern!r} runs backwards. Write '{high}-{low}'."
                )
            choices += sorted((n for n in numbers if low <= int(n) <= high), key=int)
        found.append(choices)
    return found


def _glob(pattern: str, names: Iterable[str]) -> str:
    """A regular expression with one group a pair of braces.

    `*` stays inside one dotted part; `**` as a part stands for any number of them, or none.
    """
    choices = iter(_choices(pattern, names))
    # A letter that no name has keeps the place of the braces, which may hold dots.
    parts = _BRACES.sub("\0", pattern).split(".")
    if parts == ["**"]:
        return ".*"
    regex = ""
    for index, part in enumerate(parts):
        if part == "**":
            # With its dot, so that `a.**.b` is `a.b` too.
            regex += r"(?:[^.]+\.)*" if index == 0 else r"(?:\.[^.]+)*"
            continue
        separator = "" if index == 0 or (index == 1 and parts[0] == "**") else r"\."
        regex += separator + _part(part)
    for choice in choices:
        regex = regex.replace("\0", f"({'|'.join(map(_part, choice)) or '(?!)'})", 1)
    return regex


def _part(part: str) -> str:
    letters = {"*": "[^.]*", "?": "[^.]", "\0": "\0"}
    if part == "*":
        return "[^.]+"
    return "".join(letters.get(letter, re.escape(letter)) for letter in part)
