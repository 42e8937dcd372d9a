"""Pairs of layers that names alone give: the user's maps, equal names, normalised names.

Every function takes the layers that are still free on both sides and returns new pairs, reference
to candidate; none gives one layer to two partners.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import OptionError
from ..recording.reader import Recording
from .likeness import type_likeness

__all__ = ["by_map", "by_name", "by_normalised_name", "normalised", "parse_map"]

_EXAMPLE = r"for example 'blocks\.(\d+)\.(.*)=>model.layers.\1.\2'"
_ROOT = "(root)"
# What wrappers put between a module and its parent: torch.compile, DDP, FSDP, checkpointing,
# DeepSpeed and Lightning.
_WRAPPERS = frozenset(
    {
        "_orig_mod",
        "module",
        "_fsdp_wrapped_module",
        "_fpw_module",
        "_checkpoint_wrapped_module",
        "_forward_module",
    }
)


@dataclass(frozen=True)
class Map:
    """One `regex=>template` of the user's."""

    text: str
    regex: re.Pattern[str]
    template: str

    def target(self, layer: str) -> str | None:
        """The candidate's name for a layer of the reference; None when the regex does not match."""
        match = self.regex.fullmatch(layer)
        if match is None and not layer:
            match = self.regex.fullmatch(_ROOT)
        return None if match is None else match.expand(self.template).strip(".")


def parse_map(text: str) -> Map:
    """Check a map before anything is read, so that a slip costs no time."""
    source, arrow, template = text.partition("=>")
    source, template = source.strip(), template.strip()
    if not arrow or not source:
        raise OptionError(
            f"The map '{text}' is not of the form 'regex=>template': it has "
            f"{'no regex before' if arrow else 'no'} '=>'. Write a regex for the reference's "
            f"layers and what they are called in the candidate, {_EXAMPLE}."
        )
    try:
        regex = re.compile(source)
    except re.error as error:
        raise OptionError(
            f"The regex '{source}' in the map '{text}' cannot be read: {error}. "
            f"Write 'regex=>template', {_EXAMPLE}."
        ) from None
    _check_template(text, regex, template)
    return Map(text, regex, template)


def _check_template(text: str, regex: re.Pattern[str], template: str) -> None:
    """Expand the template once, on a regex with the same groups that matches anything."""
    groups = [""] * regex.groups
    for name, index in regex.groupindex.items():
        groups[index - 1] = f"?P<{name}>"
    anything = re.match("".join(f"({group})" for group in groups), "")
    assert anything is not None
    try:
        anything.expand(template)
    except (re.error, IndexError) as error:
        raise OptionError(
            f"The template '{template}' in the map '{text}' cannot be used: {error}. The regex has "
            f"{regex.groups} group{'' if regex.groups == 1 else 's'}; write them as \\1 or "
            f"\\g<name>, {_EXAMPLE}."
        ) from None


def by_map(maps: Sequence[str], reference: Recording, candidate: Recording) -> dict[str, str]:
    """The pairs that the user's maps name; the first map that matches a layer decides on it.

    A map that leads nowhere is an error. One that leads to layers of which some are not there is
    not: the others may pair by other means.
    """
    parsed = [parse_map(text) for text in maps]
    found: dict[str, str] = {}
    owner: dict[str, str] = {}
    tried: dict[str, list[str]] = {rule.text: [] for rule in parsed}
    hits: set[str] = set()
    for layer in reference.layers:
        for rule in parsed:
            target = rule.target(layer)
            if target is None:
                continue
            tried[rule.text].append(target)
            partner = _lookup(candidate, target)
            if partner is None:
                break
            if partner in owner:
                raise OptionError(
                    f"The map '{rule.text}' sends '{layer}' to '{partner}', which '"
                    f"{owner[partner]}' was sent to already. Give each layer a name of its own "
                    f"with groups, {_EXAMPLE}."
                )
            found[layer], owner[partner] = partner, layer
            hits.add(rule.text)
            break
    _check_used(parsed, tried, hits, reference, candidate)
    return found


def _lookup(recording: Recording, name: str) -> str | None:
    if name in recording:
        return recording.resolve(name)
    return "" if name == _ROOT and "" in recording else None


def _check_used(
    parsed: Sequence[Map],
    tried: Mapping[str, Sequence[str]],
    hits: Collection[str],
    reference: Recording,
    candidate: Recording,
) -> None:
    for rule in parsed:
        if rule.text in hits:
            continue
        targets = tried[rule.text]
        if targets:
            shown = next((t for t in targets if t), targets[0])
            raise OptionError(
                f"The map '{rule.text}' leads to no layer of {candidate.path}: there is no "
                f"'{shown}'. {_near(shown, candidate)}"
            )
        if any(rule.target(layer) is not None for layer in reference.layers):
            raise OptionError(
                f"The map '{rule.text}' is never used: earlier maps match all of its layers. "
                "Put it before them."
            )
        plain = re.sub(r"\\(.)", r"\1", rule.regex.pattern)
        raise OptionError(
            f"The map '{rule.text}' matches no layer of the reference {reference.path}: its regex "
            f"must match a whole name. {_near(plain, reference)}"
        )


def _near(name: str, recording: Recording) -> str:
    known = [layer for layer in [*recording.layers, *recording.aliases] if layer]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if near:
        return f"Did you mean {' or '.join(repr(n) for n in near)}?"
    return f"It has {len(recording)} layers: tensortap show {recording.path}"


def by_name(
    reference: Recording, candidate: Recording, free: Collection[str], others: Collection[str]
) -> dict[str, str]:
    """Equal names, then a user's alias on one side or both."""
    free, others = dict.fromkeys(free), dict.fromkeys(others)
    found = {name: name for name in free if name in others}
    taken = set(found.values())
    names = {alias: layer for alias, layer in candidate.aliases.items() if layer in others}
    for layer, aliases in _aliases(reference).items():
        if layer in found or layer not in free:
            continue
        for alias in aliases:
            partner = alias if alias in others else names.get(alias)
            if partner is not None and partner not in taken:
                found[layer] = partner
                taken.add(partner)
                break
    for alias, layer in names.items():
        if alias in free and alias not in found and layer not in taken:
            found[alias] = layer
            taken.add(layer)
    return found


def _aliases(recording: Recording) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for alias, layer in recording.aliases.items():
        found.setdefault(layer, []).append(alias)
    return found


def normalised(name: str) -> str:
    """A name without what wrappers put into it, at any depth."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def by_normalised_name(
    free: Mapping[str, str],
    others: Mapping[str, str],
    agree: Callable[[str, str], bool] = lambda ours, theirs: True,
) -> dict[str, str]:
    """Names that are equal without wrappers, and without a prefix that one side alone has.

    `free` and `others` give each layer's type. Of several layers with the same plain name (a
    wrapper and what it wraps) the one of the partner's type is taken, else the outermost.
    `agree` says whether two layers hold alike values: it decides between two prefixes that explain
    equally many names, and is not asked otherwise.
    """
    ours, theirs = _by_plain_name(free), _by_plain_name(others)
    found = _match(ours, theirs, free, others, lambda name: name)
    # Equal names were looked at before, and left alone for a reason.
    found = {layer: partner for layer, partner in found.items() if layer != partner}
    for _ in range(4):  # a prefix within a prefix, or one on either side
        left = {n: layers for n, layers in ours.items() if not found.keys() & set(layers)}
        taken = set(found.values())
        right = {n: layers for n, layers in theirs.items() if not taken & set(layers)}
        more = _match_with_prefix(left, right, free, others, agree)
        if not more:
            break
        found.update(more)
    return found


def _by_plain_name(layers: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(normalised(layer), []).append(layer)
    return found


def _match(
    ours: Mapping[str, Sequence[str]],
    theirs: Mapping[str, Sequence[str]],
    free: Mapping[str, str],
    others: Mapping[str, str],
    rename: Callable[[str], str | None],
) -> dict[str, str]:
    found = {}
    for name, layers in ours.items():
        target = rename(name)
        partners = theirs.get(target, ()) if target is not None else ()
        if partners:
            pair = _best(layers, partners, free, others)
            found[pair[0]] = pair[1]
    return found


def _best(
    layers: Sequence[str],
    partners: Sequence[str],
    free: Mapping[str, str],
    others: Mapping[str, str],
) -> tuple[str, str]:
    pairs = [(ours, theirs) for ours in layers for theirs in partners]
    return min(
        pairs, key=lambda pair: (free[pair[0]] != others[pair[1]], len(pair[0]), len(pair[1]))
    )


def _match_with_prefix(
    ours: Mapping[str, Sequence[str]],
    theirs: Mapping[str, Sequence[str]],
    free: Mapping[str, str],
    others: Mapping[str, str],
    agree: Callable[[str, str], bool],
) -> dict[str, str]:
    longer = {("candidate", p): n for p, n in _prefixes(theirs, ours).items()}
    longer |= {("reference", p): n for p, n in _prefixes(ours, theirs).items()}
    options = sorted(longer, key=lambda option: (-longer[option], option))[:8]
    matches = []
    for side, prefix in options:
        rename = _adder(prefix) if side == "candidate" else _stripper(prefix)
        match = _match(ours, theirs, free, others, rename)
        match = _believable(match, min(len(ours), len(theirs)), free, others)
        if all(_is_number(layer) or _is_number(match[layer]) for layer in match):
            agreeing = sum(agree(layer, partner) for layer, partner in match.items())
            match = match if 2 * agreeing > len(match) else {}
        matches.append(match)
    matches = sorted((match for match in matches if match), key=len, reverse=True)
    if not matches:
        return {}
    rivals = [match for match in matches if len(match) >= 0.6 * len(matches[0])]
    if len(rivals) == 1:
        return rivals[0]
    scores = [sum(agree(a, b) for a, b in match.items()) for match in rivals]
    order = sorted(range(len(rivals)), key=lambda i: -scores[i])
    if scores[order[0]] > 1.5 * scores[order[1]]:
        return rivals[order[0]]
    return {}


def _believable(
    match: dict[str, str], names: int, free: Mapping[str, str], others: Mapping[str, str]
) -> dict[str, str]:
    """What a prefix explains, less what only looks like it.

    A number is a name that any two models have: it needs layers of like types, and numbers alone
    need like values. The root is what stands behind the prefix only if all the rest stands there.
    """
    root = [
        ours for ours, theirs in match.items() if not normalised(ours) or not normalised(theirs)
    ]
    if len(match) < 0.8 * names:
        match = {ours: theirs for ours, theirs in match.items() if ours not in root}
    like = {
        ours: theirs
        for ours, theirs in match.items()
        if type_likeness(free[ours], others[theirs]) or not _is_number(ours)
    }
    return like if 2 * len(like) > len(match) else {}


def _is_number(name: str) -> bool:
    """Whether a name is but positions, or the root's."""
    return all(part.isdigit() or not part for part in normalised(name).split("."))


def _prefixes(long: Iterable[str], short: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Which leading parts lead from the long names to the short ones, and how often.

    A prefix counts when it explains most names on both sides, or a fair share and several: a lone
    `fc` and `encoder.fc` among other names are no sign.
    """
    votes: Counter[str] = Counter()
    begins: Counter[str] = Counter()
    for name in long:
        parts = name.split(".") if name else []
        for cut in range(1, len(parts) + 1):
            prefix = ".".join(parts[:cut])
            begins[prefix] += 1
            votes[prefix] += ".".join(parts[cut:]) in short
    return {
        prefix: count
        for prefix, count in votes.items()
        if count
        and (
            2 * count >= max(begins[prefix], len(short))
            or (count >= 4 and 4 * count >= min(begins[prefix], len(short)))
        )
    }


def _adder(prefix: str) -> Callable[[str], str | None]:
    return lambda name: f"{prefix}.{name}" if name else prefix


def _stripper(prefix: str) -> Callable[[str], str | None]:
    def strip(name: str) -> str | None:
        if name == prefix:
            return ""
        return name[len(prefix) + 1 :] if name.startswith(f"{prefix}.") else None

    return strip
