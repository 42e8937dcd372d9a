"""What the scripts of this folder share: finding tensortap, recording modes, how a command ends."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent.parent / "src"

if importlib.util.find_spec("tensortap") is None and (SOURCES / "tensortap").is_dir():
    sys.path.insert(0, str(SOURCES))  # a clone in which nothing was installed

if TYPE_CHECKING:
    from tensortap import Recording
    from tensortap.targets.modes.results import ModeStep, RecordedModes

MODEL = "quamba-130m-w8a8"
PRETRAINED_DIR = "pretrained_models/Quamba1-pa9999/pa-0.9999"
OUTPUT_DIR = "layer_outputs"
COMPARISONS = "comparisons"
SAMPLES, SEQ_LEN, PERCENTILE, CALIB = 10, 512, 0.9999, 4
SEEDED = "seeded random weights"  # how the statistics of such a model begin
FLOATS = ("fp32", "fp16", "bf16", "fp64")
TINY = "TENSORTAP_TINY"
DONE, TROUBLE = 0, 2
_STOPPED = "Each forward was stopped"  # of no interest: behind the last layer that is saved


def main(command: Callable[[], int]) -> NoReturn:
    """Run a script's command and leave with its exit code; trouble is a sentence."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a terminal that cannot show a letter gets an escape for it
            reconfigure(errors="backslashreplace")
    try:
        import typer

        from tensortap.cli.common import guarded
    except ModuleNotFoundError as error:
        sys.exit(_lacking(error.name or "tensortap"))
    try:
        guarded(command)()
    except typer.Exit as left:
        sys.exit(left.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "numpy"):
            _broken()
        sys.exit(_lacking(error.name))
    except Exception:
        _broken()
    sys.exit(DONE)


def _broken() -> NoReturn:
    """Leave after an error of ours: Python's own exit code would say that something differs."""
    traceback.print_exc()
    sys.exit(TROUBLE)


def _lacking(package: str) -> int:
    """Say what has to be installed; the exit code."""
    say = f"tensortap: this recipe needs {package}, which {sys.executable} cannot import. "
    print(say + "Install it with: pip install 'tensortap[hf]'", file=sys.stderr)
    return TROUBLE


def say(text: str = "") -> None:
    """A line of the result, on stdout."""
    print(text)


def note(text: str) -> None:
    """Something worth knowing, on stderr."""
    print(f"note: {' '.join(text.split())}", file=sys.stderr)


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def seed(text: str) -> int:
    """What torch takes as a seed, for argparse."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number from 0 with at most 18 digits"
        )
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What every script that runs the model takes."""
    parser.add_argument(
        "--pretrained_dir",
        default=PRETRAINED_DIR,
        metavar="DIR",
        help="a transformers checkpoint of a Mamba model (default: %(default)s; without that "
        "folder, seeded random weights)",
    )
    parser.add_argument(
        "--percentile",
        type=float,
        default=PERCENTILE,
        metavar="P",
        help="where SSM input and state are clipped in calibration; 1 is min-max "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--hadamard",
        action="store_true",
        help="turn what goes into out_proj by a Hadamard matrix",
    )
    parser.add_argument(
        "--calib",
        type=count,
        default=CALIB,
        metavar="N",
        help="sequences that the scales come from, none of them recorded (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of random weights (default: 0)"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        default=os.environ.get(TINY, "") not in ("", "0"),
        help=f"24 narrow layers, to try things out; so does {TINY}=1",
    )


def model_options(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """What the target's function is given besides mode, samples and length."""
    return {
        "model": model,
        "pretrained_dir": options.pretrained_dir,
        "percentile": options.percentile,
        "hadamard": options.hadamard,
        "calib": options.calib,
        "seed": options.seed,
        "tiny": options.tiny,
    }


def is_quantised(mode: str) -> bool:
    """Whether a mode computes in anything but floats."""
    return mode not in FLOATS


def save_command(
    mode: str,
    output_dir: str,
    shape: Sequence[int] = (),
    numbers: Sequence[int] = (),
    config: Mapping[str, Any] | None = None,
) -> str:
    """The command that saves a mode, as the document has it, like another that is saved.

    `shape` and `numbers` are those of its arrays, `config` what it says of its model.
    """
    told = config or {}
    weights = str(told.get("weights") or SEEDED)
    words = ["python3", "save_layer_outputs.py", str(told.get("model") or MODEL)]
    words += ["--pretrained_dir", PRETRAINED_DIR if weights.startswith(SEEDED) else weights]
    words += ["--mode", mode, *(["--quantize"] if is_quantised(mode) else [])]
    words += ["--output_dir", output_dir]
    given: list[tuple[str, object, object]] = []
    if len(shape) == 3:
        given += [("calib_data_num", shape[0], SAMPLES), ("calib_seqlen", shape[1], SEQ_LEN)]
    given += [
        (name, told.get(name, usual), usual)
        for name, usual in (("percentile", PERCENTILE), ("calib", CALIB), ("seed", 0))
    ]
    for name, value, usual in given:
        words += [] if value == usual else [f"--{name}", str(value)]
    words += [f"--{name}" for name in ("hadamard", "tiny") if told.get(name) and not _set(name)]
    last = int(told.get("layers") or 24) - 1
    if numbers and set(numbers) != {0, last}:
        words += ["--layers", *map(str, sorted(numbers))]
    return shlex.join(words)


def _set(name: str) -> bool:
    """Whether an option is on without being named."""
    return name == "tiny" and os.environ.get(TINY, "") not in ("", "0")


@contextlib.contextmanager
def scratch(beside: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, on the disk that the results go to."""
    from tensortap.errors import OptionError

    made = [place for place in (beside, *beside.parents) if not place.exists()]
    try:
        beside.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".tensortap-", dir=beside))
    except OSError as error:
        raise OptionError(
            f"Nothing can be written to {beside}: {error.strerror or error}. Choose another place."
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for place in made:  # nothing was written: leave no empty folder behind
            with contextlib.suppress(OSError):
                place.rmdir()


def modes_of(wanted: Sequence[str]) -> tuple[str, ...]:
    """The modes that groups, lists and names stand for."""
    from quamba.target import build

    from tensortap.targets.modes.declared import mode_names

    return mode_names(build, wanted)


def record(
    modes: Sequence[str],
    folder: Path,
    *,
    layers: Sequence[str],
    inputs: bool,
    samples: int,
    seq_len: int,
    options: Mapping[str, Any],
) -> RecordedModes:
    """Record the modes one after the other in this process; those that fail are told of."""
    from quamba.target import build

    import tensortap as tap
    from tensortap.reporting.progress import progress

    with progress("Recording") as advance:
        recorded = tap.record_modes(
            build,
            folder,
            modes=list(modes),
            layers=list(layers),
            inputs=inputs,
            # Finding out where to stop costs more than the head that it spares, but for fp16's.
            early_stop="fp16" in modes and not options["tiny"],
            options={**options, "samples": samples, "seq_len": seq_len},
            progress=lambda step: advance(*_done(step, samples)),
        )
    for text in dict.fromkeys(text for mode in recorded.modes for text in mode.notes):
        if not text.startswith(_STOPPED):
            note(text)
    failed: dict[str, list[str]] = {}
    for mode in recorded.failed:
        failed.setdefault(mode.problem or "", []).append(mode.mode)
    for problem, names in failed.items():  # what is wrong with the model is so in every mode
        note(f"Mode{'s' * (len(names) > 1)} {', '.join(names)} failed: {problem}")
    return recorded


def fused_and_plain(seq_len: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the fused scan of mode 0 and the plain PyTorch of mode 2-1 differ by."""
    from quamba.paths import path_difference, path_text
    from quamba.target import build

    target = build("0", samples=1, seq_len=seq_len, **options)
    rows = path_difference(target.model, target.batches[0].kwargs["input_ids"])
    return {"text": path_text(rows), "layers": [row.to_dict() for row in rows]}


def _done(step: ModeStep, samples: int) -> tuple[int, int]:
    """How many samples of all modes are done, for a line of progress."""
    return (step.number - 1) * samples + (step.batch or 0), step.of * samples


def not_finite(told: Mapping[str, Any]) -> str:
    """What the statistics of an array leave out: `20 NaN and 1 infinite of 640`, or nothing."""
    nan, infinite = told["nan"], told["posinf"] + told["neginf"]
    if not nan and not infinite:
        return ""
    return f"{nan} NaN and {infinite} infinite of {math.prod(told['shape'])}"


def facts(run: Recording) -> dict[str, Any]:
    """What the statistics say of the model besides what was asked for: its weights above all."""
    config = run.manifest.target.get("config")
    config = config if isinstance(config, dict) else {}
    kept = ("seq_len", "samples", "weights", "tiny", "calib", "percentile", "hadamard")
    return {key: config.get(key) for key in kept}
