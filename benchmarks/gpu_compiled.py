"""Summaries of a compiled model and of a captured graph, against the same without a recorder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensortap as tap
from gpu_model import Shape, Whole, apart, build, shapes, tokens, twin
from gpu_parts import Cell, Measured, Row, Setting, Table, attempt, measure, progress

__all__ = ["compiled"]

LAYERS = 4  # of the same width: 62 take minutes to compile
ENOUGH = 40.0  # seconds, after which no further column is compiled
CHOICES = {"62 layers": "blocks", "434 linears": "type:Linear"}
AIMS = {
    ("62 layers", "1 x 128"): 1.05,
    ("62 layers", "1 x 2048"): 1.03,
    ("62 layers", "8 x 2048"): 1.01,
    ("434 linears", "1 x 128"): 1.06,
    ("434 linears", "1 x 2048"): 1.05,
    ("434 linears", "8 x 2048"): 1.04,
}


def compiled(setting: Setting) -> list[Table]:
    small = build(setting, LAYERS)
    modes = ["default", "reduce-overhead"] if setting.cuda else ["default"]
    tables = [_compiled_table(setting, small, modes)]
    del small
    if setting.cuda:
        tables.append(_graph_table(setting, build(setting)))
    return tables


class Compiled:
    """A compiled tree of its own, with a recorder of its summaries or without."""

    def __init__(
        self, setting: Setting, model: nn.Module, name: str, mode: str, layers: str | None
    ) -> None:
        self.setting, self.calls, self.recorder = setting, 0, None
        self.mode = mode
        inner = apart(Whole, name)(twin(model))
        options: dict[str, Any] = {"dynamic": False, "fullgraph": True}
        if setting.cuda:
            options["mode"] = None if mode == "default" else mode
        else:
            options["backend"] = "eager"  # quick to compile, and all that a CPU's run is for
        self.run = torch.compile(inner, **options)
        if layers is not None:
            path = setting.disk / name
            self.recorder = tap.record(
                self.run, path, layers=layers, keep="summary", strict=True
            ).start()
            self.path: Path = path

    def forward(self, ids: list[torch.Tensor]) -> Callable[[], None]:
        def call() -> None:
            if self.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                self.run(ids[self.calls % len(ids)])
            self.calls += 1
            if self.recorder is not None:
                self.recorder.step()
            self.setting.wait()

        return call

    def settle(self) -> None:
        if self.recorder is not None:
            self.recorder.flush()

    def close(self) -> None:
        if self.recorder is not None:
            layers = len(self.recorder.layers)
            self.recorder.close()
            found = len(tap.open(self.path).records)
            if found != layers * self.calls:
                raise AssertionError(f"{found} records of {layers} layers and {self.calls} calls")


def _compiled_table(setting: Setting, model: nn.Module, modes: list[str]) -> Table:
    wanted = [(mode, shape) for shape in reversed(shapes(setting)[:2]) for mode in modes]
    columns: list[tuple[str, Shape]] = []
    found: list[Measured] = []
    notes: list[str] = []
    start = time.perf_counter()
    for number, (mode, shape) in enumerate(wanted):
        if time.perf_counter() - start > ENOUGH:
            notes.append(f"{mode}, {shape.name}: left out, since compiling takes so long.")
            continue
        columns.append((mode, shape))
        measured, said = _compiled_column(setting, model, mode, shape, number)
        progress(f"{mode}, {shape.name}: {measured.first}")
        found.append(measured)
        notes += [f"{mode}, {shape.name}: {text}" for text in said]

    def aim(name: str, shape: Shape) -> float | None:
        return setting.aim(AIMS.get((name, shape.name), 9.0))

    rows = [
        Row("plain compiled forward", tuple(m.milliseconds("plain") for m in found)),
        Row("A/A", tuple(m.ratio("again") for m in found)),
    ]
    for name, title in (
        ("62 layers", f"**tap.record summaries, {LAYERS} layers**"),
        ("434 linears", f"**tap.record summaries, {7 * LAYERS} linears**"),
    ):
        pairs = zip(found, columns, strict=True)
        cells = tuple(m.ratio(name, aim=aim(name, shape)) for m, (_, shape) in pairs)
        rows.append(Row(title, cells, True))
    notes.append("`fullgraph=True`: a graph break would be an error and no row.")
    return Table(
        f"Summaries of a compiled forward, {LAYERS} layers of the same width",
        tuple(f"{mode}, {shape.name}" for mode, shape in columns),
        tuple(rows),
        tuple(notes),
    )


def _compiled_column(
    setting: Setting, model: nn.Module, mode: str, shape: Shape, number: int
) -> tuple[Measured, list[str]]:
    ids = tokens(setting, shape)
    lost: dict[str, str] = {}
    own: dict[str, Compiled] = {}
    # Recorders first: each of them makes everything compile anew.
    choices = dict(list(CHOICES.items())[: 1 if setting.tiny else 2])
    for name, layers in (*choices.items(), ("plain", None)):
        made = attempt(
            lambda name=name, layers=layers: Compiled(
                setting, model, f"compiled_{number}_{name.replace(' ', '_')}", mode, layers
            ),
            lost,
            name,
        )
        if made is not None:
            own[name] = made
    variants = {name: one.forward(ids) for name, one in own.items()}
    if "plain" in own:
        variants["again"] = own["plain"].forward(ids)
    found = measure(
        variants,
        seconds=setting.seconds(2),
        most=25,
        warm=4,
        repeat=1 if setting.tiny else 8,
        after={name: one.settle for name, one in own.items()},
        lost=lost,
    )
    said = [
        "the first calls, which compile, took "
        + ", ".join(f"{found.first[name]:.1f} s ({name})" for name in own if name in found.first)
        + "."
    ]
    for name, one in own.items():
        wrong: dict[str, str] = {}
        attempt(one.close, wrong, name)
        said += [f"{name}: {text}" for text in wrong.values()]
    torch._dynamo.reset()
    return found, said


def _graph_table(setting: Setting, model: nn.Module) -> Table:
    """Replays of `torch.cuda.graph` of the whole model, captured plain and inside a recorder."""
    found: list[Measured] = []
    notes: list[str] = []
    columns = shapes(setting)
    for number, shape in enumerate(columns):
        ids = tokens(setting, shape, 1)[0]
        lost: dict[str, str] = {}
        own: dict[str, Replay] = {}
        for name, layers in (("plain", None), *CHOICES.items()):
            path = setting.disk / f"graph_{number}_{name.replace(' ', '_')}"
            made = attempt(
                lambda ids=ids, path=path, layers=layers: Replay(
                    setting, twin(model), ids, path, layers
                ),
                lost,
                name,
            )
            if made is not None:
                own[name] = made
        for name in list(own):
            attempt(lambda own=own, name=name: _same(own["plain"], own[name]), lost, name)
            if name in lost:
                del own[name]
        variants: dict[str, Callable[[], None]] = dict(own)
        if "plain" in own:
            variants["again"] = own["plain"]
        progress(f"graph, {shape.name}: {lost or 'captured'}")
        found.append(
            measure(
                variants,
                seconds=setting.seconds(3),
                most=25,
                repeat=shape.repeat,
                after={name: one.settle for name, one in own.items()},
                lost=lost,
            )
        )
        for name, one in own.items():
            wrong: dict[str, str] = {}
            attempt(one.close, wrong, name)
            notes += [f"{shape.name}, {name}: {text}" for text in wrong.values()]
        del own, variants
        torch.cuda.empty_cache()

    def cells(cell: Callable[[Measured, Shape], Cell]) -> tuple[Cell, ...]:
        return tuple(cell(m, shape) for m, shape in zip(found, columns, strict=True))

    rows = [
        Row("plain replay", cells(lambda m, s: m.milliseconds("plain"))),
        Row("A/A", cells(lambda m, s: m.ratio("again"))),
    ]
    for name in CHOICES:
        own_cells = cells(
            lambda m, s, name=name: m.ratio(name, aim=setting.aim(AIMS.get((name, s.name), 9.0)))
        )
        rows.append(Row(f"**tap.record summaries, {name}**", own_cells, True))
    return Table(
        "Summaries inside `torch.cuda.graph`, of the plain replay",
        tuple(shape.name for shape in columns),
        tuple(rows),
        tuple(notes),
    )


def _same(plain: Replay, own: Replay) -> None:
    plain()
    own()
    if not torch.equal(plain.output, own.output):
        raise AssertionError("it gives other bits than the plain graph")


class Replay:
    """A forward captured into a graph, inside a recorder or not; calling it is one replay."""

    def __init__(
        self,
        setting: Setting,
        model: nn.Module,
        ids: torch.Tensor,
        path: Path,
        layers: str | None,
    ) -> None:
        self.setting, self.recorder, self.path, self.calls = setting, None, path, 0
        if layers is not None:
            self.recorder = tap.record(
                model, path, layers=layers, keep="summary", strict=True
            ).start()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(2):
                model(input_ids=ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.output = model(input_ids=ids, use_cache=False).last_hidden_state
        if self.recorder is not None:
            self.recorder.step()
            self.recorder.flush()

    def __call__(self) -> None:
        self.graph.replay()
        if self.recorder is not None:
            self.recorder.step()
        self.calls += 1
        self.setting.wait()

    def settle(self) -> None:
        if self.recorder is not None:
            self.recorder.flush()

    def close(self) -> None:
        if self.recorder is None:
            return
        layers = len(self.recorder.layers)
        self.recorder.close()
        if self.recorder.failure is not None:
            raise AssertionError(self.recorder.failure)
        found = len(tap.open(self.path).records)
        if found < layers * self.calls:
            raise AssertionError(f"{found} records of {layers} layers and {self.calls} replays")
