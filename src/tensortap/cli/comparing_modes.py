"""`tensortap compare` over a folder of modes: all of them, or one, against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import OptionError, RecordingError, TapError
from .common import DONE, TROUBLE, note, print_json

if TYPE_CHECKING:
    from ..comparing.modes import Modes
    from ..comparing.results import Comparison, LayerComparison

__all__ = [
    "DIFFERS",
    "Options",
    "Pair",
    "Shown",
    "compare_all",
    "listed",
    "one_mode",
    "worth_listing",
]

DIFFERS = 1


@dataclass(frozen=True)
class Options:
    """How to compare, as `tap.compare` and `tap.compare_modes` take it."""

    layers: tuple[str, ...] = ()
    floor: str | None = None
    rules: tuple[str, ...] = ()
    map: tuple[str, ...] = ()
    preset: str | None = None
    truth: str | None = None
    metrics: tuple[str, ...] = ()
    partial: bool = False
    device: str | None = None

    def to_dict(self, layers: Sequence[str]) -> dict[str, Any]:
        return {**asdict(self), "layers": list(layers) or None}


@dataclass(frozen=True)
class Shown:
    """What is shown of the answer, and how."""

    html: Path | None = None
    only_bad: bool = False
    json: bool = False


@dataclass(frozen=True)
class Pair:
    """A mode of a folder and its reference: where they lie, and what they are called."""

    reference: str
    candidate: str
    folder: str
    mode: str
    reference_mode: str

    def save(self, comparison: Comparison, layer: str | None) -> str:
        """Write the comparison beside those of the other modes; where it lies."""
        from ..comparing.mode_files import save_comparison

        with saving():
            return save_comparison(
                comparison, self.folder, self.mode, self.reference_mode, layer=layer
            )


def one_mode(folder: str, mode: str, reference: str, partial: bool) -> Pair:
    """The two recordings to compare, found by the names of their modes."""
    from ..comparing.mode_folders import COMPARISONS, open_modes

    found = open_modes(folder, partial=partial)
    trusted, judged = found.reference(reference), found.candidate(mode)
    if judged is trusted:
        rest = ", ".join(item.mode for item in found.others(trusted))
        raise OptionError(
            f"{mode} is the reference itself. Name another mode ({rest}), or another reference "
            "with --reference."
        )
    saved = f"{found.url}/{COMPARISONS}"
    return Pair(trusted.path, judged.path, saved, judged.mode, trusted.mode)


def compare_all(folder: str, reference: str, options: Options, shown: Shown, *, save: bool) -> int:
    """Every mode in the folder against the reference: a block a mode, then the table."""
    from ..comparing.mode_folders import COMPARISONS
    from ..comparing.modes import compare_modes
    from ..reporting.progress import progress

    page = shown.html
    if page is not None and (page.suffix.lower() in (".html", ".htm") or page.is_file()):
        raise OptionError(
            f"--html {page} is one page, and this is a folder of modes, with a page a mode. "
            f"Give a folder for them, as --html {folder}/{COMPARISONS}, or name the mode: "
            f"tensortap compare {folder} MODE --html {page}"
        )
    with progress("Comparing") as advance:
        modes = compare_modes(
            folder, reference, **options.to_dict(options.layers), progress=advance
        )
    if shown.json:
        for warning in modes.warnings:
            typer.echo(f"warning: {' '.join(warning.split())}", err=True)
        print_json(_data(modes, shown.only_bad))
    else:
        from ..reporting.comparisons import print_each_mode
        from ..reporting.console import stdout

        print_each_mode(stdout(), modes, only_bad=shown.only_bad)
    for text, names in _notes(modes).items():
        note(f"{', '.join(names)}: {text}")
    if shown.html is not None:
        for path in modes.save_pages(shown.html):
            note(f"The page is at {path}.")
    if save:
        place = f"{modes.folder}/{COMPARISONS}"
        with saving():
            *files, summary = modes.save(place)
        many = "1 comparison" if len(files) == 1 else f"{len(files)} comparisons"
        note(f"Wrote {many} and {summary.name} to {place}")
    if not any(row.comparison is not None and row.comparison.compared for row in modes.modes):
        return TROUBLE
    return DONE if modes.same else DIFFERS


def _notes(modes: Modes) -> dict[str, list[str]]:
    """Each note once, with the modes that it is about, whichever recordings it is of."""
    found: dict[str, dict[str, None]] = {}
    for row in modes.modes:
        done = row.comparison
        if done is None:
            continue
        both = {
            f"{done.reference} and {done.candidate}: ": (modes.reference, row.mode),
            f"{done.reference}: ": (modes.reference,),
            f"{done.candidate}: ": (row.mode,),
        }
        for text in done.notes:
            of = next((start for start in both if text.startswith(start)), "")
            names = both.get(of, (row.mode,))
            found.setdefault(text.removeprefix(of), {}).update(dict.fromkeys(names))
    return {text: list(names) for text, names in found.items()}


@contextmanager
def saving() -> Iterator[None]:
    """Say how to do without where the files cannot be written: the answer was given before."""
    try:
        yield
    except (OSError, TapError) as error:
        why = str(error) if isinstance(error, TapError) else f"{error.filename}: {error.strerror}."
        raise RecordingError(f"The comparison was not saved. {why} Or add --no-save.") from None


def _data(modes: Modes, only_bad: bool) -> dict[str, Any]:
    data = modes.to_dict()
    for made, row in zip(data["modes"], modes.modes, strict=True):
        found = row.comparison
        made["comparison"] = None
        if found is not None:
            rows = [r for r in found.layers if not only_bad or worth_listing(r)]
            made["comparison"] = listed(found, rows)
    return data


def worth_listing(row: LayerComparison) -> bool:
    return row.verdict not in ("identical", "within")


def listed(comparison: Comparison, rows: Sequence[LayerComparison]) -> dict[str, Any]:
    """A comparison's JSON with some of its layers alone."""
    names = {(row.layer, row.candidate_layer) for row in rows}
    data = comparison.to_dict()
    data["layers"] = [
        row for row in data["layers"] if (row["layer"], row["candidate_layer"]) in names
    ]
    return data
