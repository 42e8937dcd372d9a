"""The language of patterns: splitting a string, and telling whether a name matches."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable

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
    numbers = {number for name in names for number in re.findall(r"\d+", name)}
    alternatives = _expand(pattern, numbers)
    if pattern.startswith("type:"):
        return _types([alternative.removeprefix("type:") for alternative in alternatives])
    tests = [re.compile(_glob(alternative)) for alternative in alternatives]
    return lambda site: any(test.fullmatch(name) for test in tests for name in site.names)


def missing_numbers(pattern: str, places: Iterable[Site]) -> list[str]:
    """The numbers of a pattern's one range at which the model has nothing."""
    braces = _BRACES.findall(pattern)
    if len(braces) != 1 or pattern.startswith(("re:", "type:")):
        return []
    places = list(places)
    names = [name for site in places for name in site.names]
    missing = []
    for number in _wanted(braces[0]):
        single = _BRACES.sub(lambda _, number=number: number, pattern)  # type: ignore[misc]
        if not any(map(matcher(single, names), places)):
            missing.append(number)
    return missing


def _wanted(items: str, limit: int = 1024) -> list[str]:
    wanted: list[str] = []
    for item in items.split(","):
        if match := _RANGE.fullmatch(item.strip()):
            low, high = map(int, match.groups())
            wanted += [str(number) for number in range(low, min(high, low + limit) + 1)]
        else:
            wanted.append(item.strip())
    return wanted[:limit]


def _regex(text: str) -> Matcher:
    try:
        test = re.compile(text)
    except re.error as error:
        raise SelectionError(
            f"'re:{text}' is not a regular expression: {error}. It has to match a whole name."
        ) from error
    return lambda site: any(test.fullmatch(name) for name in site.names)


def _types(patterns: Iterable[str]) -> Matcher:
    wanted = list(patterns)

    def test(site: Site) -> bool:
        classes = [c for c in type(site.module).__mro__ if issubclass(c, nn.Module)]
        names = {c.__name__ for c in classes} | {f"{c.__module__}.{c.__name__}" for c in classes}
        names.add(site.type)
        return any(fnmatch.fnmatchcase(name, want) for name in names for want in wanted)

    return test


def _expand(pattern: str, numbers: Iterable[str]) -> list[str]:
    """Write out `{0,4-7}`; a range takes the numbers that occur in the model, so it may be huge."""
    match = _BRACES.search(pattern)
    if match is None:
        if "{" in pattern or "}" in pattern:
            raise SelectionError(
                f"The pattern {pattern!r} has a brace without its partner. "
                "Write a range as in 'model.layers.{0,4-7}'."
            )
        return [pattern]
    choices: list[str] = []
    for raw in match.group(1).split(","):
        item = raw.strip()
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
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [result for choice in choices for result in _expand(f"{head}{choice}{tail}", numbers)]


def _glob(pattern: str) -> str:
    """`*` stays inside one dotted part, `**` as a part stands for any number of them, or none."""
    parts = pattern.split(".")
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
    return regex


def _part(part: str) -> str:
    letters = {"*": "[^.]*", "?": "[^.]"}
    if part == "*":
        return "[^.]+"
    return "".join(letters.get(letter, re.escape(letter)) for letter in part)
