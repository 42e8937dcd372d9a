"""Summaries of a forward of the large model, against the plain, the naive and the floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

import gpu_naive as naive
from gpu_model import Forward, Shape, blocks, build, linears, shapes, tokens, twin
from gpu_parts import Cell, Measured, Row, Setting, Table, attempt, measure, progress
from gpu_recorded import SAME, Recorded, checked, closed, hooked, in_columns

__all__ = ["summaries"]

BLOCK_AIMS = {"1 x 128": 1.05, "1 x 2048": 1.03, "8 x 2048": 1.01}
LINEAR_AIMS = {"1 x 128": 1.06, "1 x 2048": 1.05, "8 x 2048": 1.04}


def summaries(setting: Setting) -> list[Table]:
    model = build(setting)
    ours = {
        "62 layers": {"layers": "blocks"},
        "434 linears": {"layers": "type:Linear"},
    }
    lost: dict[str, str] = {}
    recorded: dict[str, Recorded] = {}
    for name, options in ours.items():
        path = setting.disk / f"summaries_{name.replace(' ', '_')}"
        made = attempt(
            lambda path=path, options=options: Recorded(
                setting, twin(model), path, keep="summary", **options
            ),
            lost,
            f"ours, {name}",
        )
        if made is not None:
            recorded[f"ours, {name}"] = made
    trees = {
        "empty hooks": hooked(model, linears, naive.empty),
        "read, 62 layers": hooked(model, blocks, naive.reading),
        "read, 434 linears": hooked(model, linears, naive.reading),
    }
    slow = {
        "six, 62 layers": hooked(model, blocks, naive.statistics),
        "six, 434 linears": hooked(model, linears, naive.statistics),
    }
    first: dict[str, dict[str, float]] = {}
    quick: dict[str, Measured] = {}
    naives: dict[str, Measured] = {}
    for shape in shapes(setting):
        ids = tokens(setting, shape)
        plain = Forward(setting, model, ids)
        forwards = {name: Forward(setting, tree, ids) for name, tree in trees.items()}
        forwards |= {name: own.forward(ids) for name, own in recorded.items()}
        missing = dict(lost)
        kept = checked(plain, forwards, missing)
        first[shape.name] = {name: own.first for name, own in kept.items()}
        variants = {
            "plain": plain,
            "again": Forward(setting, model, ids),
            **kept,
        }
        quick[shape.name] = measure(
            variants,
            seconds=setting.seconds(10 * shape.weight),
            most=40,
            repeat=shape.repeat,
            lost=missing,
            after={name: own.settle for name, own in recorded.items() if name in variants},
        )
        others = {name: Forward(setting, tree, ids) for name, tree in slow.items()}
        progress(f"{shape.name}: {quick[shape.name].rounds} rounds")
        naives[shape.name] = measure(
            {"plain": plain, **others}, seconds=setting.seconds(2.5), warm=1, most=5, least=2
        )
    notes = [SAME, *closed(recorded)]
    for name in recorded:
        firsts = [f"{first[s.name].get(name, 0):.2f} s" for s in shapes(setting)]
        notes.append(f"{name}: the first forward of each shape, once, took {', '.join(firsts)}.")
    return [_summary_table(setting, model, quick, naives, notes)]


def _summary_table(
    setting: Setting,
    model: nn.Module,
    quick: Mapping[str, Measured],
    naives: Mapping[str, Measured],
    notes: list[str],
) -> Table:
    columns = shapes(setting)
    read = _read_speed(setting)
    widths = {
        "62 layers": [linears(block)[-1].out_features for block in blocks(model)],
        "434 linears": [linear.out_features for linear in linears(model)],
    }

    def floor(name: str) -> Callable[[Shape], Cell]:
        def cell(shape: Shape) -> Cell:
            nbytes = 2 * shape.batch * shape.length * sum(widths[name])
            plain = quick[shape.name].milliseconds("plain").value
            return Cell(1 + nbytes / read / (plain / 1e3)) if plain else Cell(missing="no plain")

        return cell

    def own(name: str, base: Mapping[str, Measured] = quick) -> Callable[[Shape], Cell]:
        return lambda shape: base[shape.name].ratio(name)

    def aimed(name: str, aims: Mapping[str, float]) -> Callable[[Shape], Cell]:
        return lambda s: quick[s.name].ratio(name, aim=setting.aim(aims.get(s.name, 9.0)))

    rows = [
        ("plain forward", lambda s: quick[s.name].milliseconds("plain"), False),
        ("A/A", own("again"), False),
        ("six statistics with `.item()`, 62 layers", own("six, 62 layers", naives), False),
        ("the same on all 434 linears", own("six, 434 linears", naives), False),
        ("empty hooks on 434 linears (floor of any hook)", own("empty hooks"), False),
        ("computed floor: reading the bytes once, 62 layers", floor("62 layers"), False),
        ("the same, 434 linears", floor("434 linears"), False),
        ("one `sum()` a tensor, 62 layers", own("read, 62 layers"), False),
        ("the same, 434 linears", own("read, 434 linears"), False),
        ("**tap.record summaries, 62 layers**", aimed("ours, 62 layers", BLOCK_AIMS), True),
        ("**tap.record summaries, 434 linears**", aimed("ours, 434 linears", LINEAR_AIMS), True),
    ]
    return Table(
        "Summaries of a forward, of the plain forward",
        tuple(shape.name for shape in columns),
        tuple(Row(name, in_columns(columns, cell), mine) for name, cell, mine in rows),
        (*notes, f"A plain read reached {read / 1e12:.2f} TB/s in this part."),
    )


def _read_speed(setting: Setting) -> float:
    """Bytes a second of torch's own sum over 2 GB."""
    x = torch.ones((1 << 16) if setting.tiny else (1 << 29), device=setting.device)

    def read() -> None:
        for _ in range(10):
            x.sum()
        setting.wait()

    found = measure({"read": read}, seconds=setting.seconds(0.3), most=9)
    assert found.timings is not None
    return 10 * x.numel() * 4 / found.timings.median("read")
