"""The tables of benchmarks/gpu.py as text, as markdown, and in their place in a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_parts import Cell, Row, Table

__all__ = ["BEGIN", "END", "as_json", "from_json", "markdown", "merged", "paste", "text"]

BEGIN = "<!-- benchmarks/gpu.py begin -->"
END = "<!-- benchmarks/gpu.py end -->"
ORDER = ("recording", "summaries", "kernels", "difference", "compiled", "watch", "compare")


def as_json(table: Table) -> dict[str, Any]:
    return asdict(table)


def from_json(data: Mapping[str, Any]) -> Table:
    rows = tuple(
        Row(row["name"], tuple(Cell(**cell) for cell in row["cells"]), row["ours"])
        for row in data["rows"]
    )
    return Table(data["title"], tuple(data["columns"]), rows, tuple(data["notes"]))


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several runs as one: a part that was run again replaces the earlier one."""
    if not results:
        raise SystemExit("There is no result to take the tables from: name a file of --json.")
    places = {result["where"]["device"] for result in results}
    if len(places) > 1:
        raise SystemExit(f"These results are of different devices: {', '.join(sorted(places))}.")
    found: dict[str, Any] = {**results[-1], "parts": {}, "seconds": {}}
    for result in results:
        found["parts"] |= result["parts"]
        found["seconds"] |= result["seconds"]
    return found


def where_line(result: Mapping[str, Any]) -> str:
    where = result["where"]
    return (
        f"Measured on one {where['device']} ({where['host']}; torch {where['torch']}, "
        f"triton {where['triton']}, driver {where['driver']}) on {where['when']}: "
        f"{where['model']}. All of it took "
        f"{sum(result['seconds'].values()) / 60:.1f} minutes."
    )


def text(table: Table) -> str:
    lines = [f"\n{table.title}"]
    for row in table.rows:
        lines.append(f"  {row.name.replace('*', '')}")
        for column, cell in zip(table.columns, row.cells, strict=True):
            lines.append(f"  {'':4}{column:<12}  {cell.text()}")
    return "\n".join([*lines, *(f"  - {note}" for note in table.notes)])


def markdown(result: Mapping[str, Any]) -> str:
    """All that stands between the two markers of docs/benchmarks.md."""
    said = [where_line(result), ""]
    parts = sorted(result["parts"].items(), key=lambda part: ORDER.index(part[0]))
    tables = [from_json(data) for _, part in parts for data in part]
    for table in tables:
        said += [f"### {table.title}", ""]
        said += [*_table(table), ""] if table.rows else []
        said += [*(f"- {note}" for note in table.notes), ""] if table.notes else []
    said += _judged(tables)
    return "\n".join(said).rstrip() + "\n"


def _table(table: Table) -> Iterable[str]:
    yield f"| | {' | '.join(table.columns)} |"
    yield f"|---|{'---|' * len(table.columns)}"
    for row in table.rows:
        yield f"| {row.name} | {' | '.join(cell.text() for cell in row.cells)} |"


def _judged(tables: Iterable[Table]) -> list[str]:
    """What was met and what was not, in one paragraph."""
    met, missed = 0, []
    for table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                if cell.met:
                    met += 1
                elif cell.met is False:
                    assert cell.value is not None
                    name = row.name.replace("*", "")
                    missed.append(
                        f"{name} at {column} ({cell.number(cell.value)}, aim {cell.aim:g})"
                    )
    if not met and not missed:
        return []
    lines = [f"Of {met + len(missed)} aims {met} {'is' if met == 1 else 'are'} met."]
    if missed:
        lines[0] += f" Missed: {'; '.join(missed)}."
    return lines


def paste(page: Path, result: Mapping[str, Any]) -> None:
    """Put the tables between the page's two markers."""
    whole = page.read_text()
    if whole.count(BEGIN) != 1 or whole.count(END) != 1 or whole.index(BEGIN) > whole.index(END):
        raise SystemExit(f"{page} needs one line {BEGIN} and behind it one line {END}.")
    before, rest = whole.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{markdown(result)}{END}{after}")
