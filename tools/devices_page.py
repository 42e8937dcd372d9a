"""The tables and pictures of docs/devices.md, from docs/devices.json; see tools/devices.py."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensortap.reporting.figures import GRID, INK, MUTED, new_figure, save, styled

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "devices.md"
BEGIN, END = "<!-- {}: made by tools/devices.py -->", "<!-- end of {} -->"
COLOURS = {
    "gpu-fp32": "#2563a8",
    "gpu-compiled": "#2bb5a3",
    "gpu-tf32": "#d9730d",
    "gpu-bf16": "#c2385b",
    "cpu-bf16": "#8b4fc6",
}
KINDS = (
    *("norm1", "attention.q", "attention.k", "attention.v", "attention.mix", "attention.o"),
    *("norm2", "mlp.gate", "mlp.up", "mlp.down"),
)
PLANTED = {
    "epsilon": "1e-5 for 1e-6",
    "bias": "of the keys, not loaded",
    "transposed": "a square weight",
    "tf32": "in one layer alone",
}
WITHIN = 2.0  # times a measured floor

Data = Mapping[str, Any]
Row = Mapping[str, Any]


def write(data: Data, docs: Path = PAGE.parent) -> None:
    """Draw the pictures, and put the tables between the marks of the page."""
    page = docs / PAGE.name
    page.write_text(with_tables(page.read_text(), data))
    with styled():
        errors(data, docs / "devices-error.png")
        inside(data, docs / "devices-inside.png")
        fault(data, docs / "devices-fault.png")


def with_tables(text: str, data: Data) -> str:
    """The page with every table as the data has it."""
    for name, make in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in text or end not in text:
            raise SystemExit(f"The page has no marks for the table {name!r}: {begin} … {end}")
        part = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text = part.sub(lambda _: f"{begin}\n{make(data)}\n{end}", text)  # noqa: B023
    return text


def comparison(data: Data, name: str) -> Data:
    return next(item for item in data["comparisons"] if item["name"] == name)


def rows(data: Data, found: Data) -> dict[str, Row]:
    """By layer, what was measured there."""
    return {row[0]: dict(zip(data["columns"], row, strict=True)) for row in found["rows"]}


def blocks(data: Data, found: Data) -> list[Row]:
    """What leaves each block."""
    there = rows(data, found)
    return [row for name, row in there.items() if re.fullmatch(r"blocks\.\d+", name)]


# Tables.


def machine(data: Data) -> str:
    at, size = data["machine"], data["size"]
    layers = len(comparison(data, "gpu-fp32")["rows"])
    return (
        f"Measured on one {at['gpus'][0]} (torch {at['torch']}, CUDA {at['cuda']}) and its host "
        f"({at['cpu']}, {at['threads']} threads, {at['cpu_capability']}): {size['blocks']} blocks, "
        f"hidden {size['hidden']}, {size['heads']} heads, {size['tokens']} tokens, {layers} layers "
        f"recorded a mode. All of it took {data['seconds']:.0f} s."
    )


def modes(data: Data) -> str:
    told = {
        "cpu-1-thread": ("threads", "-"),
        "cpu-order": ("order", "is the floor"),
        "gpu-fp32": ("gpu-fp32", None),
        "gpu-compiled": ("gpu-compiled", None),
        "gpu-tf32": ("gpu-tf32", None),
        "gpu-bf16": ("gpu-bf16", None),
        "cpu-bf16": ("cpu-bf16", None),
    }
    head = "| mode | error behind block 0 | behind the last | of the logits | 1 - cosine | max abs "
    lines = [f"{head}| × floor, largest | verdict |", "|---|---:|---:|---:|---:|---:|---:|---|"]
    for mode, (name, floor) in told.items():
        found = comparison(data, name)
        there, behind = rows(data, found), blocks(data, found)
        last = there["head"]
        lines.append(
            f"| `{mode}` | {short(behind[0]['error'])} | {short(behind[-1]['error'])} "
            f"| {short(last['error'])} | {short(last['cosine_distance'])} "
            f"| {short(last['max_abs'])} | {floor or largest(there.values())} | {verdict(found)} |"
        )
    return "\n".join(lines)


def largest(found: Any) -> str:
    return short(max((row["floor_ratio"] or 0.0 for row in found), default=math.nan))


def verdict(found: Data) -> str:
    counts = found["counts"]
    if not found["same"]:
        return f"diverged, first at `{found['first']}`"
    if set(counts) == {"identical"}:
        return "identical"
    return "within"


def local(data: Data) -> str:
    """Block 0, whose inputs are the same bits in every float32 mode."""
    names = ("order", "gpu-fp32", "gpu-compiled", "gpu-tf32", "gpu-bf16")
    found = {name: rows(data, comparison(data, name)) for name in names}
    titles = " | ".join("floor (`cpu-order`)" if name == "order" else f"`{name}`" for name in names)
    lines = [f"| layer | {titles} |", "|---|" + "---:|" * len(names)]
    for kind in (*(f"blocks.0.{kind}" for kind in KINDS), "blocks.0"):
        cells = " | ".join(short(found[name][kind]["error"]) for name in names)
        lines.append(f"| `{kind}` | {cells} |")
    return "\n".join(lines)


def truth(data: Data) -> str:
    names = ("order", "gpu-fp32", "gpu-compiled", "gpu-tf32", "cpu-bf16", "gpu-bf16")
    lines = [
        "| candidate | layers where it is nearer | where `cpu-fp32` is | even | typical distance "
        "from float64 | its logits | those of `cpu-fp32` |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        found = comparison(data, name)
        there = rows(data, found)
        sides = [side(row) for row in there.values() if row["candidate_error"] is not None]
        typical = statistics.median(row["candidate_error"] for row in there.values())
        head = there["head"]
        lines.append(
            f"| `{found['candidate']}` | {sides.count('candidate')} | {sides.count('reference')} "
            f"| {sides.count('even')} | {short(typical)} | {short(head['candidate_error'])} "
            f"| {short(head['reference_error'])} |"
        )
    return "\n".join(lines)


def side(row: Row) -> str:
    """The nearer one, as `compare --truth` calls it."""
    ours, theirs = row["reference_error"], row["candidate_error"]
    if max(ours, theirs) <= 1.05 * min(ours, theirs):
        return "even"
    return "reference" if ours < theirs else "candidate"


def faults(data: Data) -> str:
    planted = list(dict.fromkeys((item["fault"], item["layer"]) for item in data["faults"]))
    columns = [item for item in data["faults"] if item["fault"] == planted[0][0]]
    shown = list(dict.fromkeys((item["mode"], item["floor"]) for item in columns))
    shown.sort(key=lambda pair: pair[1] is None)
    titles = " | ".join(
        f"`{mode}`, {f'floor `{floor}`' if floor else 'no floor'}" for mode, floor in shown
    )
    lines = [f"| planted | in | {titles} |", "|---|---|" + "---|" * len(shown)]
    for name, layer in planted:
        cells = [fault_cell(data, name, *pair) for pair in shown]
        lines.append(f"| `{name}`: {PLANTED[name]} | `{layer}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def fault_cell(data: Data, name: str, mode: str, floor: str | None) -> str:
    if name == "tf32" and not mode.endswith("fp32"):
        return "not there"
    wanted = (name, mode, floor)
    found = next(f for f in data["faults"] if (f["fault"], f["mode"], f["floor"]) == wanted)
    ratio = rows(data, found)[found["layer"]]["floor_ratio"]
    if found["first"] is None:
        return f"missed: {short(ratio)} × floor"
    if found["first"] == found["layer"]:
        return f"**found**: {short(ratio)} × floor"
    return f"first divergence at `{found['first']}`"


def environment(data: Data) -> str:
    found = comparison(data, "gpu-tf32")
    lines = ["| differs | `cpu-fp32` | `gpu-tf32` |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {a} | {b} | {c} |" for a, b, c in found["differs"])])


TABLES: dict[str, Callable[[Data], str]] = {
    "machine": machine,
    "modes": modes,
    "local": local,
    "truth": truth,
    "faults": faults,
    "environment": environment,
}


def short(value: float | None) -> str:
    """Two digits, without an exponent where it is a plain number."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 1000:
        return f"{float(f'{value:.2g}'):g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


# Pictures.


def errors(data: Data, path: Path) -> None:
    """The error behind each block, a line a mode, over the floor as a band."""
    figure = new_figure(7.6, 4.0)
    panel = figure.subplots()
    floor = [row["error"] for row in blocks(data, comparison(data, "order"))]
    at = list(range(len(floor)))
    low = min(floor) / 4
    allowed = [WITHIN * value for value in floor]
    panel.fill_between(at, low, allowed, color="#dfe7ee", linewidth=0, zorder=1)
    panel.text(at[-1], low * 1.15, "within: up to twice the floor", color=MUTED, ha="right")
    panel.plot(at, floor, color=MUTED, linewidth=1.2, linestyle=(0, (4, 2)))
    lines = [("floor (cpu-order)", MUTED, floor)]
    for mode, colour in COLOURS.items():
        values = [row["error"] for row in blocks(data, comparison(data, mode))]
        beside = mode in ("cpu-bf16", "gpu-compiled")  # over a line that it hardly leaves
        style, width = ("--", 1.8) if beside else ("-", 3.0)
        panel.plot(at, values, style, color=colour, linewidth=width, zorder=3)
        lines.append((mode, colour, values))
    panel.set_yscale("log")
    panel.set_xlim(0, at[-1])
    panel.set_ylim(bottom=low)
    label_ends(panel, at[-1], lines)
    panel.set_xticks(at)
    panel.set(title="Error behind each block, against fp32 on the CPU", xlabel="block")
    panel.set_ylabel("relative L2 error")
    finish(figure, panel, path)


def label_ends(panel: Any, at: float, lines: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """Names at the ends of the lines, apart enough to be read, on a logarithmic axis."""
    placed: list[float] = []
    low, high = (math.log10(limit) for limit in panel.get_ylim())
    apart = (high - low) / 22
    for name, colour, values in sorted(lines, key=lambda line: line[2][-1]):
        y = math.log10(values[-1])
        y = max(y, placed[-1] + apart) if placed else y
        placed.append(y)
        panel.annotate(
            name,
            (at, 10**y),
            xytext=(6, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            annotation_clip=False,
        )


def inside(data: Data, path: Path) -> None:
    """What each layer of block 0 makes, a bar a mode."""
    names = ("gpu-fp32", "gpu-compiled", "gpu-tf32", "gpu-bf16")
    figure = new_figure(7.6, 3.4)
    panel = figure.subplots()
    floor = rows(data, comparison(data, "order"))
    least = 2e-8
    for place, name in enumerate(names):
        there = rows(data, comparison(data, name))
        values = [max(least, there[f"blocks.0.{kind}"]["error"]) for kind in KINDS]
        at = [index + 0.2 * (place - 1.5) for index in range(len(KINDS))]
        panel.bar(at, values, width=0.19, color=COLOURS[name], label=name)
    for index, kind in enumerate(KINDS):
        value = max(least, floor[f"blocks.0.{kind}"]["error"])
        label = "floor (cpu-order)" if index == 0 else None
        panel.plot([index - 0.42, index + 0.42], [value] * 2, color=INK, label=label, linewidth=1.4)
    panel.set_yscale("log")
    panel.set_ylim(bottom=least)
    panel.set_xticks(range(len(KINDS)), [kind.rpartition(".")[2] for kind in KINDS])
    panel.set(title="Error inside block 0, against fp32 on the CPU", ylabel="relative L2 error")
    panel.legend(frameon=False, fontsize=8, ncols=5, loc="upper left", bbox_to_anchor=(0, 1.02))
    top = max(rows(data, comparison(data, "gpu-bf16"))[f"blocks.0.{k}"]["error"] for k in KINDS)
    panel.set_ylim(top=top * 12)
    finish(figure, panel, path)


def fault(data: Data, path: Path) -> None:
    """The wrong epsilon: error over floor at every layer, in three precisions."""
    figure = new_figure(7.6, 3.6)
    panel = figure.subplots()
    shown = [f for f in data["faults"] if f["fault"] == "epsilon" and f["floor"]]
    layers = [row[0] for row in shown[0]["rows"]]
    for found in shown:
        there = rows(data, found)
        ratios = [there[name]["floor_ratio"] or math.nan for name in layers]
        label = f"{found['mode']}, floor {found['floor']}"
        style, width = ("--", 1.8) if found["mode"] == "gpu-bf16" else ("-", 2.2)
        colour = COLOURS[found["mode"]]
        panel.plot(range(len(layers)), ratios, style, color=colour, label=label, linewidth=width)
    panel.axhline(WITHIN, color=MUTED, linewidth=1, linestyle=(0, (4, 2)))
    panel.text(len(layers) - 1, WITHIN * 1.12, "twice the floor", color=MUTED, ha="right")
    culprit = shown[0]["layer"]
    panel.axvline(layers.index(culprit), color=INK, linewidth=0.8)
    panel.set_yscale("log")
    panel.set_ylim(top=panel.get_ylim()[1] * 2.2)
    high = panel.get_ylim()[1]
    panel.text(layers.index(culprit) + 2, high * 0.9, culprit, color=INK, va="top")
    starts = {name: layers.index(f"{name}.norm1") for name in block_names(layers)}
    panel.set_xticks(list(starts.values()), [name.rpartition(".")[2] for name in starts])
    panel.set(title="A wrong epsilon in one norm: error over floor", xlabel="block (every layer)")
    panel.set_ylabel("error / floor")
    panel.legend(frameon=False, fontsize=8)
    finish(figure, panel, path)


def block_names(layers: Sequence[str]) -> list[str]:
    return [name for name in layers if re.fullmatch(r"blocks\.\d+", name)]


def finish(figure: Any, panel: Any, path: Path) -> None:
    panel.grid(axis="y", color=GRID)
    panel.set_axisbelow(True)
    save(figure, path)
