"""`--resume`: which recordings are there already, and are the ones that were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import DamagedError, NotARecordingError
from ...recording import reader

__all__ = ["DRAWN_FROM", "Earlier", "differences", "look"]

DRAWN_FROM = "drawn_from"  # what torch's random numbers began with; nothing that was asked for

_WORDS = {
    "set": "--set",
    "prompts": "--prompt",
    "calib": "--calib",
    "layers": "--layers",
    "inputs": "--inputs",
    "outputs": "--outputs",
    "grads": "--grads",
    "keep": "--keep",
    "histograms": "--histograms",
    "early_stop": "--early-stop",
    "perturb": "--perturb",
    "against": "--against",
    "mode_table": "tensortap.toml",
    "self_check": "--self-check",
}


@dataclass(frozen=True)
class Earlier:
    """A recording that lies where a mode's is to be: kept, refused with a problem, or replaced."""

    recording: reader.Recording | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()


def look(path: str, made_with: Mapping[str, Any]) -> Earlier:
    """What to do about what is at a path: nothing there, or half a recording, is made anew."""
    try:
        recording = reader.open(path)
    except (NotARecordingError, DamagedError):
        return Earlier()
    if recording.status != "complete" or not recording.layers:
        return Earlier()
    then = recording.manifest.selection.get("made_with")
    again = "Record it anew with --overwrite (overwrite=True in Python), or choose another folder."
    if not isinstance(then, Mapping):
        return Earlier(
            problem=f"{path} holds a recording that does not say with which options it was made, "
            f"so that it cannot be known again. {again}"
        )
    changed = differences(then, made_with)
    if changed:
        return Earlier(
            problem=f"{path} holds a recording that was made with other options: "
            f"{'; '.join(changed)}. {again}"
        )
    return Earlier(recording, notes=tuple(_notes(then, made_with)))


def _notes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What has changed and may not matter: the target's code, files that its options name."""
    said = []
    for what, name in _names(then, now).items():
        if _digest(then, what) != _digest(now, what):
            target = (now.get("mode_table") or {}).get("target") or now.get("target")
            of = f"target '{target}'" if what == "target" else f"option {what[4:]}, {name},"
            said.append(
                f"The file of the {of} has changed since this mode was recorded; the recording was "
                "kept as it is. --overwrite makes it anew."
            )
    return said


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a recording was made with and what is asked for now, where they differ, in words."""
    found = []
    for key in dict.fromkeys((*then, *now)):
        if key == DRAWN_FROM:
            continue
        if key == "files":
            found += _changed_files(then, now)
        elif key == "target":
            if not _same_target(then, now):
                found.append(f"the target was '{then.get(key)}' and is '{now.get(key)}'")
        elif key == "options":
            found += _pairs(then.get(key) or {}, now.get(key) or {})
        elif then.get(key) != now.get(key):
            found += _pairs(
                {_WORDS.get(key, key): then.get(key)}, {_WORDS.get(key, key): now.get(key)}
            )
    return found


def _pairs(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} was {_shown(then.get(key))} and is {_shown(now.get(key))}"
        for key in dict.fromkeys((*then, *now))
        if then.get(key) != now.get(key)
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {item}" for key, item in value.items())
    return str(value)


def _changed_files(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Models and inputs count by their bytes, wherever they lie; what may not matter is a note."""
    found = []
    for what, name in _names(then, now).items():
        if _may_not_matter(what, name) or _digest(then, what) == _digest(now, what):
            continue
        flag = "the target" if what == "target" else f"--{what.split()[0].replace('_', '-')}"
        before = _name(then, what)
        said = f"{before} then, {name} now" if before != name else name
        found.append(f"the file of {flag} is not the same ({said})")
    return found


def _names(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The files on either side, by what they are; the name of each as it is now."""
    both = dict.fromkeys((*(then.get("files") or {}), *(now.get("files") or {})))
    return {what: _name(now, what) for what in both}


def _name(made_with: Mapping[str, Any], what: str) -> str:
    return str(((made_with.get("files") or {}).get(what) or {}).get("name") or "none")


def _may_not_matter(what: str, name: str) -> bool:
    """Code: or a mistake in one mode could not be mended without making all others again."""
    return what.startswith("set ") or (what == "target" and name.endswith(".py"))


def _same_target(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """The same words, or the same file with the same bytes, named from another folder."""
    old, new = str(then.get("target")), str(now.get("target"))
    if old == new:
        return True
    digests = _digest(then, "target"), _digest(now, "target")
    same_end = (
        old.replace("\\", "/").rpartition("/")[2] == new.replace("\\", "/").rpartition("/")[2]
    )
    return same_end and digests[0] is not None and digests[0] == digests[1]


def _digest(made_with: Mapping[str, Any], what: str) -> str | None:
    found = (made_with.get("files") or {}).get(what)
    return found.get("digest") if isinstance(found, Mapping) else None
