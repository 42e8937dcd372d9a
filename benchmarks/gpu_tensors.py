"""All outputs of the large model's layers recorded, against the plain, the naive and the floor."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

import gpu_naive as naive
from gpu_model import Forward, Shape, blocks, build, linears, shapes, tokens, twin
from gpu_parts import Cell, Measured, Row, Setting, Table, attempt, measure, progress
from gpu_recorded import SAME, Recorded, checked, hooked, in_columns

__all__ = ["recording"]

TENSOR_AIMS = {"1 x 128": 1.15, "1 x 2048": 1.08, "8 x 2048": 1.03}


def recording(setting: Setting) -> list[Table]:
    model = build(setting)
    columns = shapes(setting)
    places = {"/dev/shm": setting.memory, "disk": setting.disk}
    found: dict[tuple[str, str], Measured] = {}
    written: dict[tuple[str, str], Cell] = {}
    notes: list[str] = [SAME]
    trees = {place: twin(model) for place in places}
    lost: dict[str, str] = {} if setting.cuda else {"pinned": "it needs a CUDA device"}
    careful = hooked(model, blocks, naive.pinned()) if setting.cuda else None
    copied = hooked(model, blocks, naive.copying)
    for shape in columns:
        ids = tokens(setting, shape)
        plain = Forward(setting, model, ids)
        plain()
        slow = {"plain": plain, "copying": Forward(setting, copied, ids)}
        brief = setting.seconds(2)
        warm = 0 if _large(shape) else 1
        found[shape.name, "slow"] = measure(slow, seconds=brief, warm=warm, most=5, least=1)
        for place, folder in places.items():
            others = {"again": Forward(setting, model, ids)}
            if place == "/dev/shm" and careful is not None:
                others["pinned"] = Forward(setting, careful, ids)
            path = folder / f"tensors_{shape.batch}x{shape.length}"
            try:
                found[shape.name, place], written[shape.name, place], said = _record_to(
                    setting, trees[place], path, shape, plain, others, dict(lost)
                )
                notes += [f"{shape.name} to {place}: {text}" for text in said]
                progress(f"{shape.name} to {place}: {found[shape.name, place].rounds} rounds")
            finally:
                shutil.rmtree(path, ignore_errors=True)
    pool = ", ".join(f"{s.name}: {s.budget / (1 << 30):g} GiB" for s in columns)
    notes.append(
        f"The budget of a recorder ({pool}; half of it is the pinned pool) holds what a timing "
        "leaves behind; between timings everything is written and waited for. Where a model runs "
        "on without a pause it is held back to the speed of the next table."
    )
    return [_tensor_table(setting, found, notes), _written_table(setting, places, written)]


def _record_to(
    setting: Setting,
    tree: nn.Module,
    path: Path,
    shape: Shape,
    plain: Forward,
    others: Mapping[str, Forward],
    lost: dict[str, str],
) -> tuple[Measured, Cell, list[str]]:
    """Forwards recorded to one place: their times, and bytes a second until all is written."""
    before = _peak(plain)
    own = attempt(lambda: Recorded(setting, tree, path, budget=shape.budget), lost, "ours")
    if own is None:
        return Measured(lost=lost), Cell(missing=lost["ours"]), []
    forwards = {**others, "ours": own.forward(plain.ids)}
    kept = checked(plain, forwards, lost)
    more = torch.cuda.max_memory_allocated() - before if setting.cuda else 0
    attempt(own.settle, lost, "ours")
    kept = {name: forward for name, forward in kept.items() if name not in lost}
    large = _large(shape)
    if "ours" in kept:
        attempt(lambda: _until_pinned(kept["ours"], own.settle), lost, "ours")
        kept = {name: forward for name, forward in kept.items() if name not in lost}
    try:
        found = measure(
            {"plain": plain, **kept},
            seconds=setting.seconds(6 * shape.weight),
            most=40,
            least=3,
            warm=0 if large else 2,
            repeat=shape.repeat,
            after={"ours": own.settle},
            lost=lost,
        )
    finally:
        lost_later: dict[str, str] = {}
        attempt(own.close, lost_later, "ours")
    if "ours" in lost_later and "ours" not in found.lost:
        found.lost["ours"] = lost_later["ours"]
    if "ours" in found.lost:
        return found, Cell(missing=found.lost["ours"]), []
    layers = blocks(tree)
    width = linears(layers[-1])[-1].out_features
    nbytes = 2 * shape.batch * shape.length * width * len(layers) * shape.repeat
    took = own.until_written[-found.rounds :]
    speed = Cell(nbytes / statistics.median(took) / 1e9, unit="GB/s")
    first = kept["ours"].first
    said = f"once, the first forward took {first:.2f} s (pinning, kernels)"
    if setting.cuda:
        said += f"; {more / 1e6:.0f} MB of device memory at most beside the plain forward's"
    return found, speed, [f"{said}."]


def _until_pinned(forward: Forward, settle: Callable[[], object]) -> None:
    """Forwards until they get no quicker. One that is held up by pinning gives its buffers back
    meanwhile, so the next one, which is not, needs more of them: it takes two or three.
    """
    last = math.inf
    for _ in range(4):
        start = time.perf_counter()
        forward()
        took = time.perf_counter() - start
        settle()
        if took > 0.9 * last:
            return
        last = took


def _large(shape: Shape) -> bool:
    """Whether a forward leaves so much behind that a disk takes seconds: few rounds."""
    return shape.batch * shape.length >= 1 << 14


def _peak(forward: Forward) -> int:
    """The most memory of the device that a forward takes, with what was there before."""
    if not forward.setting.cuda:
        return 0
    torch.cuda.reset_peak_memory_stats()
    forward()
    return torch.cuda.max_memory_allocated()


def _tensor_table(
    setting: Setting, found: Mapping[tuple[str, str], Measured], notes: list[str]
) -> Table:
    columns = shapes(setting)

    def own(name: str, part: str, aims: Mapping[str, float] | None = None) -> Callable[..., Cell]:
        def cell(shape: Shape) -> Cell:
            aim = aims.get(shape.name) if aims else None
            return found[shape.name, part].ratio(
                name, aim=None if aim is None else setting.aim(aim)
            )

        return cell

    rows = [
        ("plain forward", lambda s: found[s.name, "/dev/shm"].milliseconds("plain"), False),
        ("A/A", own("again", "/dev/shm"), False),
        ("hooks with `.detach().cpu()`", own("copying", "slow"), False),
        (
            "by hand: pinned copies on a side stream (nothing written, not safe in place)",
            own("pinned", "/dev/shm"),
            False,
        ),
        ("**tap.record tensors, to /dev/shm**", own("ours", "/dev/shm", TENSOR_AIMS), True),
        ("**tap.record tensors, to disk**", own("ours", "disk", TENSOR_AIMS), True),
    ]
    return Table(
        "All 62 layers' outputs recorded, of the plain forward",
        tuple(shape.name for shape in columns),
        tuple(Row(name, in_columns(columns, cell), mine) for name, cell, mine in rows),
        tuple(notes),
    )


def _written_table(
    setting: Setting, places: Mapping[str, Path], written: Mapping[tuple[str, str], Cell]
) -> Table:
    floors = tuple(_write_speed(setting, folder) for folder in places.values())
    rows = [Row("floor: `write` of 1 GB and fsync, one thread", floors)]
    for shape in shapes(setting):
        cells = tuple(written[shape.name, place] for place in places)
        rows.append(Row(f"**tap.record tensors, {shape.name}**", cells, True))
    return Table(
        "From the beginning of a forward until all of its tensors are written",
        tuple(places),
        tuple(rows),
    )


def _write_speed(setting: Setting, folder: Path) -> Cell:
    """A plain write of 1 GB from warm memory, in pieces of 16 MB, and fsync."""
    piece = torch.randint(0, 256, ((1 << 12) if setting.tiny else (1 << 24),), dtype=torch.uint8)
    data, count, path = memoryview(piece.numpy()), 4 if setting.tiny else 60, folder / "floor"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(count):
                file.write(data)
            os.fsync(file.fileno())

    found = measure({"write": write}, seconds=setting.seconds(2), most=3, least=2, warm=1)
    path.unlink(missing_ok=True)
    return found.speed("write", count * len(data), "GB/s")
