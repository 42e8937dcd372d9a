"""Makes docs/devices.md: records one model on two devices, compares, writes tables and pictures.

    python tools/devices.py --measure [--tiny] [--runs DIR] [--json FILE]
    python tools/devices.py                                       # the page, from the JSON

The first command records every mode of recipes/devices/llama.py and every fault, compares them,
and writes what it found to docs/devices.json; without a GPU it says so and measures the modes of
the CPU, into a file that --json names. The second needs no GPU: it draws the pictures and writes
the tables between the marks of the page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "recipes" / "devices")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the processes that we start

import tensortap as tap  # noqa: E402

SPEC = f"{ROOT / 'recipes' / 'devices' / 'llama.py'}:build"
DATA = ROOT / "docs" / "devices.json"
REFERENCE, TRUTH, COMPILED = "cpu-fp32", "cpu-fp64", "gpu-compiled"
COLUMNS = (
    "layer",
    "verdict",
    "error",
    "cosine_distance",
    "max_abs",
    "floor",
    "floor_ratio",
    "reference_error",
    "candidate_error",
)


@dataclass(frozen=True)
class Question:
    """Two runs to compare, a floor, and what it is asked for."""

    name: str
    reference: str
    candidate: str
    floor: str | None = None
    truth: str | None = None

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(run for run in (self.reference, self.candidate, self.floor, self.truth) if run)


QUESTIONS = (
    Question("order", REFERENCE, "cpu-order", truth=TRUTH),
    Question("threads", REFERENCE, "cpu-1-thread"),
    Question("cpu-bf16", REFERENCE, "cpu-bf16", "cpu-order", TRUTH),
    Question("gpu-fp32", REFERENCE, "gpu-fp32", "cpu-order", TRUTH),
    Question("gpu-fp32, no floor", REFERENCE, "gpu-fp32"),
    Question("repeat", "gpu-fp32", "gpu-repeat"),
    Question("gpu-compiled", REFERENCE, COMPILED, "cpu-order", TRUTH),
    Question("compiled and eager", "gpu-fp32", COMPILED, "cpu-order"),
    Question("gpu-tf32", REFERENCE, "gpu-tf32", "cpu-order", TRUTH),
    Question("gpu-tf32, no floor", REFERENCE, "gpu-tf32"),
    Question("gpu-bf16", REFERENCE, "gpu-bf16", "cpu-order", TRUTH),
    Question("gpu-bf16, bf16 floor", REFERENCE, "gpu-bf16", "cpu-bf16"),
    Question("gpu-bf16, no floor", REFERENCE, "gpu-bf16"),
)
# A fault is looked for in each of these modes, beside the floor that forgives the mode and no more.
FLOORS = {"gpu-fp32": "cpu-order", "gpu-tf32": "gpu-tf32", "gpu-bf16": "gpu-bf16"}
FLOORS_WITHOUT = {"cpu-fp32": "cpu-order", "cpu-bf16": "cpu-bf16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="record and compare, write the JSON")
    parser.add_argument("--tiny", action="store_true", help="a model of 4 small blocks")
    parser.add_argument("--runs", type=Path, help="keep the recordings here")
    parser.add_argument("--json", type=Path, default=DATA, help="default: docs/devices.json")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    given = parser.parse_args()
    if not given.measure:
        import devices_page

        devices_page.write(json.loads(given.json.read_text()))
        return
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(given.runs or Path(folder), given.tiny, given.jobs):
            if "gpu-fp32" not in found["modes"] and given.json == DATA:
                sys.exit("Without a GPU docs/devices.json stays as it is. Name a file with --json.")
            text = json.dumps(found, separators=(",", ":")).replace('},{"', '},\n{"')
            given.json.write_text(f"{text}\n")
            told = f"{len(found['comparisons'])} comparisons, {len(found['faults'])} of faults"
            say(f"{found['seconds']:.0f} s: {given.json}: {told}")


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def measure(runs: Path, tiny: bool, jobs: int) -> Iterator[dict[str, Any]]:
    """Everything that the page tells, as soon as it is known: what is compiled comes last.

    The recordings are in `runs`, the numbers in what is yielded.
    """
    import llama
    import torch

    gpu = torch.cuda.is_available()
    if not gpu:
        said = ", ".join(llama.MODE_GROUPS["gpu"])
        say(f"torch {torch.__version__} sees no CUDA device: {said} are left out.")
    began = time.perf_counter()
    sets = ["tiny=true"] if tiny else []
    compiled = compile_aside(runs, sets) if gpu else None  # which takes longer than all the rest
    wanted = [m for m in llama.MODES if m != COMPILED and (gpu or m.startswith("cpu"))]
    done = {row.mode: row.seconds for row in record(runs, wanted, sets)}
    say(f"{time.perf_counter() - began:.0f} s: recorded {', '.join(done)}")
    floors = FLOORS if gpu else FLOORS_WITHOUT
    looked = []
    for fault in llama.FAULTS:
        modes = [mode for mode in floors if fault != "tf32" or mode.endswith("fp32")]
        looked += [
            Question(f"{fault}/{row.mode}", REFERENCE, f"faults/{fault}/{row.mode}", floor)
            for row in record(runs / "faults" / fault, modes, [*sets, f"fault={fault}"])
            for floor in (floors[row.mode], None)
        ]
    say(f"{time.perf_counter() - began:.0f} s: recorded {', '.join(llama.FAULTS)}")
    asked = [question for question in QUESTIONS if set(question.runs) <= set(done)]
    with answering(jobs) as answered:
        answers = answered([(runs, question) for question in (*asked, *looked)])
        found = {
            "machine": machine(runs, done),
            "seconds": round(time.perf_counter() - began, 1),
            "size": tap.open(runs / REFERENCE).manifest.target.get("config"),
            "modes": {mode: round(seconds, 2) for mode, seconds in done.items()},
            "columns": COLUMNS,
            "comparisons": answers[: len(asked)],
            "faults": [fault_row(item, llama, tiny) for item in answers[len(asked) :]],
        }
        yield found
        if compiled is None or compiled.wait() != 0:
            return
        asked = [question for question in QUESTIONS if COMPILED in question.runs]
        answers = answered([(runs, question) for question in asked])
        found["modes"][COMPILED] = round(time.perf_counter() - began, 2)
        found["comparisons"] = [*found["comparisons"], *answers]
        yield {**found, "seconds": round(time.perf_counter() - began, 1)}


def record(folder: Path, modes: Sequence[str], sets: Sequence[str]) -> list[Any]:
    """The modes that could be recorded; of the others, why not."""
    made = tap.record_modes(
        SPEC,
        folder,
        modes=list(modes),
        sets=list(sets),
        layers="all",
        inputs=True,
        overwrite=True,
        early_stop=False,
    )
    for row in made.failed:
        say(f"{row.mode}: {row.problem}")
    return [row for row in made.modes if row not in made.failed]


def compile_aside(runs: Path, sets: Sequence[str]) -> subprocess.Popen[bytes]:
    """The compiled mode by the command, in a process of its own, while the others are recorded."""
    options = [word for text in sets for word in ("--set", text)]
    words = ["record", SPEC, "--mode", COMPILED, "-o", str(runs / COMPILED), *options]
    words += ["--layers", "all", "--inputs", "--overwrite", "--no-early-stop"]
    return subprocess.Popen([sys.executable, "-m", "tensortap", *words], stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def answering(jobs: int) -> Iterator[Callable[[Sequence[Any]], list[dict[str, Any]]]]:
    """What answers questions: this process, or several at once."""
    if jobs <= 1:
        yield lambda asked: [answer(item) for item in asked]
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of each of them
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        yield lambda asked: list(pool.map(answer, asked))


def answer(asked: tuple[Path, Question]) -> dict[str, Any]:
    """One comparison, as the page needs it; runs in a process of its own."""
    runs, q = asked
    found = tap.compare(
        runs / q.reference,
        runs / q.candidate,
        floor=None if q.floor is None else runs / q.floor,
        truth=None if q.truth is None else runs / q.truth,
    )
    first = found.first_divergence
    whole = q.floor or q.truth or "/" in q.name  # else the page shows what leaves the blocks
    return {
        "name": q.name,
        "reference": q.reference,
        "candidate": q.candidate,
        "floor": q.floor,
        "truth": q.truth,
        "same": found.same,
        "counts": found.counts,
        "sentence": found.sentence.replace(f"{runs}/", ""),
        "first": None if first is None else first.layer,
        "origin": None if first is None else first.origin,
        "causes": [] if first is None else [str(cause) for cause in first.causes],
        "differs": [[item.name, item.reference, item.candidate] for item in found.environment],
        "warnings": [text.replace(f"{runs}/", "") for text in found.warnings],
        "notes": [text.replace(f"{runs}/", "") for text in found.notes],
        "rows": [
            [value(row, name) for name in COLUMNS]
            for row in found.layers
            if whole or re.fullmatch(r"blocks\.\d+|head|", row.layer)
        ],
    }


def value(row: Any, name: str) -> Any:
    if name in ("cosine_distance", "max_abs"):
        found = None if row.difference is None else getattr(row.difference, name)
    else:
        found = getattr(row, name)
    if not isinstance(found, float):
        return found
    return None if math.isnan(found) else float(f"{found:.4g}") if math.isfinite(found) else "inf"


def fault_row(found: dict[str, Any], llama: Any, tiny: bool) -> dict[str, Any]:
    """What a comparison says of a planted fault; of its rows, those that the page shows."""
    fault, mode = found["name"].split("/")
    layer = llama.FAULTS[fault](llama.Model(llama.TINY if tiny else llama.Size()))
    drawn = fault == "epsilon" and found["floor"] is not None
    rows = [row for row in found["rows"] if drawn or row[0] in (layer, "")]
    return {**found, "fault": fault, "mode": mode, "layer": layer, "rows": rows}


def machine(runs: Path, done: dict[str, float]) -> dict[str, Any]:
    """What the recordings say of where they were made, and the processor's name."""
    manifest = tap.open(runs / ("gpu-fp32" if "gpu-fp32" in done else REFERENCE)).manifest
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), cpu)
    return {"torch": manifest.torch, "cpu": cpu, **manifest.environment}


if __name__ == "__main__":
    main()
