"""Every model by every runtime: how many layers are recorded, how far from eager (`make matrix`).

    python tools/matrix.py [--models NAME …] [--runtimes NAME …] [--jobs N] [--page FILE]

Each cell runs in a process of its own with a limit of time, so that a crash costs one cell. In it
the model is compiled, saved, recorded with `tap.record(file, …, layers="all")` and held against the
eager recording. A wrong tensor or a self-check that failed makes the cell red and the exit code 1.
`--page docs/compiled.md` writes the table between the marks of that page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # no threads before the fork, no noise behind it
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # the compiler's own time
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

import tensortap as tap  # noqa: E402
from programs.cells import RUNTIMES, Cannot, judge, prepare, record, record_eager, unordered  # noqa: E402
from programs.models import MODELS  # noqa: E402

BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
LIMIT = 240.0
TITLES = {
    "minimax_m2": "MiniMaxM2",
    "resnet": "ResNet-like",
    "bert": "BERT",
    "t5": "T5",
    "vit": "ViT",
}


@dataclass(frozen=True)
class Cell:
    """What came of one model in one runtime."""

    model: str
    runtime: str
    state: str  # right, wrong, cannot, failed
    why: str = ""
    expected: int = 0
    recorded: int = 0
    largest: float = 0.0
    missing: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)  # of these says `tap.compare` so
    leaves_missing: int = 0
    leaves_extra: int = 0
    checks: int = 0
    failed_checks: list[str] = field(default_factory=list)
    provenance: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def red(self) -> bool:
        return self.state in ("wrong", "failed")


# One cell.


def run_cell(model: str, runtime: str, folder: Path, **options: Any) -> Cell:
    """Compile, record, judge; runs in a process of its own."""
    start = time.perf_counter()

    def cell(state: str, why: str = "", **rest: Any) -> Cell:
        return Cell(model, runtime, state, why, seconds=time.perf_counter() - start, **rest)

    own = folder / f"{model}-{runtime}"
    own.mkdir(exist_ok=True)
    try:
        artefact, built = prepare(model, runtime, own)
    except Cannot as error:
        return cell("cannot", str(error))
    try:
        found = record(artefact, built, own / "recording", **options)
        eager = tap.open(folder / f"{model}-eager")
        inside = artefact.inside(eager) if artefact.inside else None
        verdict = judge(eager, found, RUNTIMES[runtime], inside)
        kinds: dict[str, int] = {}
        for name in found.layers:
            kind = found[name].records[0].provenance
            kinds[kind] = kinds.get(kind, 0) + 1
        diverged = [] if RUNTIMES[runtime].quantised else _diverged(eager, found)
    except Exception as error:
        return cell("failed", f"{type(error).__name__}: {error}"[:600])
    finally:
        shutil.rmtree(own, ignore_errors=True)
    right = verdict.right and not diverged
    return cell(
        "right" if right else "wrong", diverged=diverged, provenance=kinds, **asdict(verdict)
    )


def _diverged(eager: tap.Recording, found: tap.Recording) -> list[str]:
    rows = tap.compare(eager, found).layers
    bad = [row.layer for row in rows if row.verdict in ("diverged", "incomparable")]
    return [name or "the model" for name in bad if not unordered(eager, name)]


def _child(
    model: str, runtime: str, folder: Path, answer: Path, options: Mapping[str, Any]
) -> None:
    with (folder / f"{model}-{runtime}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        answer.write_text(json.dumps(asdict(run_cell(model, runtime, folder, **options))))


# All of them.


def run_all(
    models: Sequence[str],
    runtimes: Sequence[str],
    folder: Path,
    jobs: int,
    limit: float,
    options: Mapping[str, Any],
) -> Iterator[Cell]:
    """Every cell, as they are done; the models' imports are made once, before the forks."""
    if {"compile", "aoti"} & set(runtimes):
        import_module("torch._inductor.compile_fx")
    import_module("tensortap.comparing.compare")
    for model in models:
        record_eager(model, folder / f"{model}-eager")
    context = multiprocessing.get_context("fork")
    waiting = [(model, runtime) for runtime in runtimes for model in models]
    running: dict[tuple[str, str], tuple[Any, float, Path]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            key = waiting.pop(0)
            answer = folder / f"{key[0]}-{key[1]}.json"
            process = context.Process(target=_child, args=(*key, folder, answer, options))
            process.start()
            running[key] = (process, time.monotonic(), answer)
        for key, (process, start, answer) in list(running.items()):
            if process.is_alive() and time.monotonic() - start > limit:
                process.kill()
                process.join()
                yield Cell(*key, "failed", f"not done after {limit:g} s", seconds=limit)
            elif process.is_alive():
                continue
            elif process.exitcode == 0 and answer.exists():
                yield Cell(**json.loads(answer.read_text()))
            else:
                yield Cell(*key, "failed", _last_words(folder, key, process.exitcode))
            process.join()
            del running[key]
        time.sleep(0.05)


def _last_words(folder: Path, key: tuple[str, str], code: int | None) -> str:
    log = folder / f"{key[0]}-{key[1]}.log"
    lines = log.read_text().strip().splitlines() if log.exists() else []
    return f"the process ended with {code}: {lines[-1] if lines else ''}"


# The page.


def page(cells: Sequence[Cell]) -> str:
    """The table and its footnotes."""
    notes: dict[str, list[str]] = {}
    models = list(dict.fromkeys(cell.model for cell in cells))
    found = {(cell.model, cell.runtime): cell for cell in cells}
    runtimes = [name for name in RUNTIMES if any(cell.runtime == name for cell in cells)]
    head = ["", *(TITLES.get(name, name.capitalize()) for name in models)]
    lines = [_row(head), "|---" * len(head) + "|"]
    for runtime in runtimes:
        texts = [
            _text(found[model, runtime], notes) if (model, runtime) in found else "not run"
            for model in models
        ]
        lines.append(_row([f"**{RUNTIMES[runtime].title}**", *texts]))
    lines += [
        "",
        *(_note(index, text, where) for index, (text, where) in enumerate(notes.items(), 1)),
    ]
    return "\n".join([_summary(cells), "", *lines])


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _text(cell: Cell, notes: dict[str, list[str]]) -> str:
    """A cell: layers recorded of layers that eager has, and the largest difference."""

    def mark(text: str, where: str) -> str:
        notes.setdefault(text, []).append(where)
        return str(list(notes).index(text) + 1)

    title = RUNTIMES[cell.runtime].title
    place = f"{TITLES.get(cell.model, cell.model.capitalize())} in {title}"
    if cell.state in ("cannot", "failed"):
        word = "-" if cell.state == "cannot" else "**failed**"
        return f"{word} <sup>{mark(cell.why, '')}</sup>"
    marks = [mark(reason, f"{place}: {_names(layers)}") for reason, layers in cell.missing.items()]
    text = f"{cell.recorded}/{cell.expected}"
    if RUNTIMES[cell.runtime].quantised:
        text += f" · ≈{cell.largest:.0%}"
    else:
        text += " · 0" if cell.largest == 0 else f" · {cell.largest:.0e}".replace("e-0", "e-")
    if marks:
        text += f" <sup>{', '.join(sorted(set(marks), key=int))}</sup>"
    return f"**WRONG** {text}" if cell.red else text


def _names(layers: Sequence[str]) -> str:
    shown = [f"`{name}`" if name else "the model" for name in layers[:3]]
    return ", ".join(shown) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


def _note(index: int, text: str, where: Sequence[str]) -> str:
    places = [place for place in where if place]
    text = text.replace("|", "\\|").replace("<", "&lt;")
    behind = f" ({'; '.join(places[:3])}{'; …' if len(places) > 3 else ''})" if places else ""
    return f"{index}. {text.rstrip('.')}.{behind}"


def _summary(cells: Sequence[Cell]) -> str:
    done = [cell for cell in cells if cell.state in ("right", "wrong")]
    wrong = sum(len(cell.wrong) for cell in done)
    return (
        f"{len(done)} of {len(cells)} cells can be; in them {sum(c.recorded for c in done)} of "
        f"{sum(c.expected for c in done)} layers are recorded, {wrong} wrong, "
        f"{sum(c.checks for c in done)} self-checks made, "
        f"{sum(len(c.failed_checks) for c in done)} failed. {_versions()}."
    )


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in (
        "torch",
        "transformers",
        "torchao",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "openvino",
    ):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def write_page(path: Path, text: str) -> None:
    """Put the table between the marks of a page."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no marks {BEGIN} and {END}.")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{behind}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--runtimes", nargs="+", choices=list(RUNTIMES), default=list(RUNTIMES))
    parser.add_argument("--jobs", type=int, default=1, help="how many cells run at a time")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a cell may take")
    parser.add_argument("--accept-inferred", action="store_true", help="guesses are judged too")
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    parser.add_argument("--cells", type=Path, nargs="+", help="read these cells, run none")
    parser.add_argument("--json", type=Path, help="write every cell to this file")
    options = parser.parse_args()
    cells: list[Cell] = []
    for path in options.cells or ():  # the later file counts where two hold the same cell
        cells += [Cell(**item) for item in json.loads(path.read_text())]
    cells = list({(cell.model, cell.runtime): cell for cell in cells}.values())
    if not options.cells:
        cells = _run(options)
    order = {name: index for index, name in enumerate(MODELS)}
    cells.sort(key=lambda cell: order[cell.model])
    text = page(cells)
    if options.cells:
        text += f"\n\nPut together from {len(options.cells)} runs of some columns each."
    sys.stdout.write(text + "\n")
    if options.page:
        write_page(options.page, text)
    return 1 if any(cell.red for cell in cells) else 0


def _run(options: argparse.Namespace) -> list[Cell]:
    """Run the cells, and keep them in a file as they come, if that is wanted."""
    folder = Path(tempfile.mkdtemp(prefix="tensortap-matrix-"))
    cells: list[Cell] = []
    try:
        chosen = (options.models, options.runtimes, folder, options.jobs, options.limit)
        settings = {"accept_inferred": True} if options.accept_inferred else {}
        for cell in run_all(*chosen, settings):
            cells.append(cell)
            sys.stderr.write(_told(cell))
            sys.stderr.flush()
            if options.json:
                data = [asdict(cell) for cell in cells]
                options.json.write_text(json.dumps(data, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return cells


def _told(cell: Cell) -> str:
    """A cell on the way: everything that somebody may want to look into."""
    head = f"{cell.runtime:18s} {cell.model:11s} {cell.state:7s} {cell.seconds:5.1f} s  "
    if cell.state in ("cannot", "failed"):
        return f"{head}{cell.why}\n"
    kinds = " ".join(f"{kind}:{count}" for kind, count in cell.provenance.items())
    lines = [f"{head}{cell.recorded}/{cell.expected}  {cell.largest:.2g}  {kinds}"]
    if cell.leaves_missing or cell.leaves_extra:
        lines.append(f"    leaves: {cell.leaves_missing} missing, {cell.leaves_extra} extra")
    lines += [f"    WRONG {text}" for text in cell.wrong]
    lines += [f"    compare says diverged: {', '.join(cell.diverged[:6])}"] if cell.diverged else []
    lines += [f"    self-check: {text}" for text in cell.failed_checks]
    lines += [
        f"    missing, {reason}: {', '.join(names)}" for reason, names in cell.missing.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
