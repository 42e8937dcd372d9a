"""The target: `tensortap record quamba/target.py:build --modes essential -o runs`.

Without a checkpoint the weights are random and seeded; every mode gets the same weights and the
same inputs. Scales come from calibration batches with a seed of their own.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tensortap as tap
from tensortap.errors import MissingExtraError, OptionError

if not __package__:  # loaded as a file: let its own package be found, before any other quamba
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quamba.mode_config import MODE_GROUPS, MODES

if TYPE_CHECKING:
    from quamba.calibration import Calibration

__all__ = ["DEFAULT_DIR", "MODES", "MODE_GROUPS", "build", "is_tiny"]

DEFAULT_DIR = "pretrained_models/Quamba1-pa9999/pa-0.9999"
_CALIBRATION = 1_000_003  # added to the seed, so that no batch is calibrated and compared


def is_tiny(tiny: bool = False) -> bool:
    """Whether a small model is asked for, by the option or by TENSORTAP_TINY=1."""
    return tiny or os.environ.get("TENSORTAP_TINY", "") not in ("", "0")


def build(
    mode: str = "fp32",
    *,
    seq_len: int = 512,
    samples: int = 10,
    pretrained_dir: str | None = None,
    model: str = "quamba-130m-w8a8",
    seed: int = 0,
    tiny: bool = False,
    hadamard: bool = False,
    percentile: float = 0.9999,
    calib: int = 4,
    batch_size: int | None = None,
    depth: int | None = None,
) -> tap.Target:
    """The model in a mode, and its inputs: `samples` sequences, the same in every mode.

    `calib` others calibrate the scales, clipped at `percentile` where the mode clips. `tiny` has
    the same 24 layers, narrow. A batch is one sequence; in a tiny model, whose time goes into
    steps rather than numbers, all of them; or `batch_size`. Of all layers the first `depth` run:
    what they compute is the same without the others.
    """
    if mode not in MODES:
        raise OptionError(f"There is no mode {mode!r}. The modes are {', '.join(MODES)}.")
    folder = _folder(pretrained_dir)
    tiny = is_tiny(tiny) and folder is None  # a checkpoint is what it is
    rows = batch_size if batch_size is not None else samples if tiny else 1
    counts = {"seq_len": seq_len, "samples": samples, "calib": calib, "batch_size": rows}
    counts |= {} if depth is None else {"depth": depth}
    for name, value in counts.items():
        if value < 1:
            raise OptionError(f"{name} is {value}, expected at least 1.")
    if not 0 < percentile <= 1:
        raise OptionError(f"percentile is {percentile}, expected a share, as 0.9999; at most 1.")
    which = (model, folder, seed, tiny, depth)
    source = _source(*which)
    found = None
    if MODES[mode].quantised:
        found = _calibration(*which, seq_len, calib, percentile, hadamard)
    weights = str(folder) if folder else f"seeded random weights (seed {seed})"

    from quamba.model import in_mode

    ids = _ids(source.config.vocab_size, seq_len, samples, seed)
    return tap.Target(
        in_mode(source, MODES[mode], found),
        [{"input_ids": batch} for batch in torch.split(ids, rows)],
        mode=mode,
        config={
            "model": model,
            "weights": weights,
            "tiny": tiny,
            "seq_len": seq_len,
            "samples": samples,
            "seed": seed,
            "calib": calib,
            "percentile": percentile,
            "hadamard": hadamard,
            "mode": dict(zip(_COLUMNS, MODES[mode].words(), strict=True)),
            "layers": source.config.num_hidden_layers,
            "hidden": source.config.hidden_size,
        },
        notes=_notes(pretrained_dir, folder, weights),
    )


_COLUMNS = ("mode", "conv1d output", "SSM input", "SSM arithmetic", "linears")


def _notes(wanted: str | None, folder: Path | None, weights: str) -> tuple[str, ...]:
    if folder is not None:
        return ()
    lacking = f"{wanted} does not exist, so the" if wanted else "The"
    return (f"{lacking} model has {weights}.",)


def _folder(pretrained_dir: str | None) -> Path | None:
    """The checkpoint's folder; none where the documents' own default is not there."""
    if pretrained_dir is None:
        return None
    folder = Path(pretrained_dir).expanduser()
    default = os.path.normpath(pretrained_dir) == os.path.normpath(DEFAULT_DIR)
    return None if default and not folder.exists() else folder


def _ids(vocabulary: int, length: int, samples: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (samples, length), generator=generator)


@lru_cache(maxsize=1)
def _source(name: str, folder: Path | None, seed: int, tiny: bool, depth: int | None = None) -> Any:
    """The float model; the last one is kept, since the next mode asks for the same."""
    try:
        from quamba.model import SHAPES, TINY, checkpoint, seeded, with_mixers
    except ImportError as error:
        raise MissingExtraError("transformers", "hf", "The quamba recipe") from error
    if name not in SHAPES:
        raise OptionError(f"There is no model {name!r} here. Known are {', '.join(SHAPES)}.")
    shape = TINY if tiny else SHAPES[name]
    model: Any = seeded(shape, seed) if folder is None else checkpoint(folder)
    model.backbone.layers = model.backbone.layers[:depth]
    return with_mixers(model, shape.segment)


@lru_cache(maxsize=4)
def _calibration(
    name: str,
    folder: Path | None,
    seed: int,
    tiny: bool,
    depth: int | None,
    length: int,
    count: int,
    percentile: float,
    hadamard: bool,
) -> Calibration:
    """The scales, found once a process for all modes."""
    from quamba.calibration import calibrate

    model = _source(name, folder, seed, tiny, depth)
    ids = _ids(model.config.vocab_size, length, count, seed + _CALIBRATION)
    batches = torch.split(ids, count if tiny else 1)
    return calibrate(model.backbone, batches, percentile, hadamard=hadamard)
