"""Selecting layers: a union of patterns, less what is excluded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import SelectionError
from ..recording.schema import Structure
from .patterns import WORDS, matcher, missing_numbers, split
from .sites import Site, is_called, is_internal, is_leaf, sites
from .structure import structure

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """The chosen layers in module order, and what the user should be told about the choice."""

    layers: tuple[Site, ...]
    notes: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.layers)


def select(
    model: nn.Module, patterns: str | Sequence[str], *, default_fallback: bool = False
) -> Selection:
    """The layers of a model that the patterns name.

    A pattern is an exact name (`""` is the root), a glob (`*` within one dotted part, `**` over
    any number of parts), a range (`model.layers.{0,4-7}`), `re:…` on the whole name, `type:…`
    on the class or a base class, or a word: `all`, `leaves`, `blocks`, `first`, `last`,
    `embedding`, `final_norm`. Several, or one string with commas, are a union; `!pattern`
    excludes wherever it stands, and alone excludes from `all`.

    An exact name beats a word, unless it is a mere container: a ModuleList or ModuleDict is never
    called and has nothing to record, so in a model whose blocks are the list `blocks` the word
    means each of them. A container asked for by any other name is an error that names
    `container.*`; patterns pass over containers.

    `default_fallback` is for a selection that the user did not make: `blocks` on a model without
    repeated blocks then means `leaves`, and a note says so.
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    wanted = [part for text in wanted for part in split(text)]
    if not wanted:
        raise SelectionError("The selection is empty: give at least one pattern, such as 'blocks'.")
    chooser = _Chooser(model, default_fallback)
    includes = [pattern for pattern in wanted if not pattern.startswith("!")]
    excludes = [pattern[1:].strip() for pattern in wanted if pattern.startswith("!")]
    chosen = {site.name for p in includes or ["all"] for site in chooser.choose(p)}
    dropped = {site.name for p in excludes for site in chooser.choose(p)}
    layers = tuple(
        site for site in chooser.places if site.name in chosen and site.name not in dropped
    )
    if not layers:
        raise SelectionError(
            f"Nothing is left to record: {_quoted(f'!{p}' for p in excludes)} excludes every layer "
            f"that {_quoted(includes or ['all'])} selects. Take an exclusion out."
        )
    return Selection(layers, tuple(chooser.notes), tuple(wanted))


class _Chooser:
    """One model, looked at once for all patterns."""

    def __init__(self, model: nn.Module, default_fallback: bool) -> None:
        self.places = sites(model)
        self.by_name = {name: site for site in self.places for name in site.names}
        self.called = [site for site in self.places if is_called(site.module)]
        self.notes: list[str] = []
        self._model = model
        self._fallback = default_fallback
        self._structure: Structure | None = None

    def choose(self, pattern: str) -> list[Site]:
        pattern = pattern.replace("_orig_mod.", "")
        exact = self.by_name.get(pattern)
        if exact is not None and is_called(exact.module):
            return [exact]
        if pattern in WORDS:
            return self._word(pattern)
        if exact is not None:
            raise SelectionError(self._container(exact, pattern))
        matches = matcher(pattern, self.by_name)
        found = [site for site in self.called if matches(site)]
        if not found:
            raise SelectionError(self._no_match(pattern))
        if missing := missing_numbers(pattern, list(self.by_name)):
            more = f", … ({len(missing)} numbers)" if len(missing) > 8 else ""
            self._note(f"{pattern!r} matches nothing at {', '.join(missing[:8])}{more}.")
        return found

    def _word(self, word: str) -> list[Site]:
        if word == "all":
            return self.called
        if word == "leaves":
            return self._leaves()
        if self._structure is None:
            self._structure = structure(self._model)
        found = self._structure
        if word in ("embedding", "final_norm"):
            name = found.embedding if word == "embedding" else found.final_norm
            if name is None:
                raise SelectionError(self._no_role(word))
            return [self.by_name[name]]
        if not found.blocks:
            if self._fallback and word == "blocks":
                self._note("The model has no repeated blocks; its leaves are recorded instead.")
                return self._leaves()
            raise SelectionError(self._no_role(word))
        names = {"blocks": found.blocks, "first": found.blocks[:1], "last": found.blocks[-1:]}
        return [self.by_name[name] for name in names[word]]

    def _leaves(self) -> list[Site]:
        return [site for site in self.called if is_leaf(site.module) and not is_internal(site.name)]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _container(self, site: Site, pattern: str) -> str:
        inside = [s for s in self.called if s.name.startswith(f"{pattern}.")]
        inside = inside or [
            s for s in self.called if any(n.startswith(f"{pattern}.") for n in s.names)
        ]
        if not inside:
            return (
                f"The layer {pattern!r} is a {site.type}, which is never called and so has nothing "
                "to record. Select a layer that has a forward."
            )
        return (
            f"The layer {pattern!r} is a {site.type}, which only holds other modules and is never "
            f"called, so there is nothing to record. Select what it holds: '{pattern}.*' "
            f"({_some([s.name for s in inside])})."
        )

    def _no_role(self, word: str) -> str:
        part = {"embedding": "embedding", "final_norm": "norm behind its last block"}.get(word)
        what = f"no {part}" if part else "no repeated blocks"
        return (
            f"The word {word!r} selects nothing: by its structure, {type(self._model).__name__} "
            f"has {what}. Select layers by name instead, or by 'leaves' or 'all'; "
            f"its first layers are {_some([s.name for s in self.called if s.name])}."
        )

    def _no_match(self, pattern: str) -> str:
        if pattern.startswith("type:"):
            types = sorted({site.type for site in self.called})
            near = difflib.get_close_matches(pattern[5:], types, n=3, cutoff=0.4)
            return (
                f"No layer is of the type {pattern[5:]!r}. "
                f"{'Near types' if near else 'The types of the model'}: {_some(near or types)}."
            )
        near = self._near(pattern.removeprefix("re:"))
        text = f"No layer matches {pattern!r}. "
        if near:
            text += f"Near names: {_some(near)}. "
        return text + (
            "The words " + ", ".join(f"'{w}'" for w in WORDS) + " work on every model; "
            "add --plan with --layers all to list its layers."
        )

    def _near(self, pattern: str) -> list[str]:
        names = [n for s in self.called for n in s.names if n]
        lowered: dict[str, str] = {}
        for name in [*names, *WORDS]:
            lowered.setdefault(name.lower(), name)
        close = difflib.get_close_matches(pattern.lower(), lowered, n=3, cutoff=0.6)
        near = [lowered[name] for name in close]
        last = pattern.lower().rpartition(".")[2]
        ends = [name for name in names if name.lower().rpartition(".")[2] == last]
        return list(dict.fromkeys(near + ends[:2]))


def _some(names: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown + (f", … ({len(names)} in all)" if len(names) > limit else "")


def _quoted(patterns: Iterable[str]) -> str:
    return ", ".join(f"'{pattern}'" for pattern in patterns)
