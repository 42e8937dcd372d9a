"""The layers of a recording as rows: one a site, or one a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..recording.series import Series, summary_table
from . import text
from .console import table
from .provenance import brief

if TYPE_CHECKING:
    from rich.table import Table

    from ..numerics.summary import Summary
    from ..recording.health import Finding
    from ..recording.reader import Record, Recording

__all__ = ["LayerRow", "findings_table", "header", "layer_rows", "layers_table", "row_of"]


@dataclass(frozen=True)
class LayerRow:
    """One site of a recording with the merged summary of its records, or a single record."""

    layer: str
    alias: str | None
    type: str
    port: str
    leaf: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    records: int
    stored: bool
    epoch: int | None
    batch: int | None
    call: int | None
    rank: int
    summary: Summary
    provenance: str = "hook"
    over_steps: dict[str, Any] | None = None  # of a watched run: first and last, and the way there

    def to_dict(self) -> dict[str, Any]:
        """The row as `show --json` prints it."""
        summary = self.summary.to_dict()
        summary.pop("histogram", None)
        result: dict[str, Any] = {
            "layer": self.layer,
            "alias": self.alias,
            "type": self.type,
            "port": self.port,
            "leaf": self.leaf,
            "shape": list(self.shapes[0]),
            "dtype": self.dtypes[0],
            "records": self.records,
            "stored": self.stored,
            "rank": self.rank,
            "provenance": self.provenance,
            **summary,
        }
        if len(self.shapes) > 1:
            result["shapes"] = [list(shape) for shape in self.shapes]
        if len(self.dtypes) > 1:
            result["dtypes"] = list(self.dtypes)
        if self.over_steps is not None:
            result["over_steps"] = self.over_steps
        moments = {"epoch": self.epoch, "batch": self.batch, "call": self.call}
        return {**result, **{key: value for key, value in moments.items() if value is not None}}


def layer_rows(
    records: Sequence[Record],
    *,
    each: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[LayerRow]:
    """Rows in order of execution; without `each`, the records of one site are merged into one."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for number, record in enumerate(records):
        key = (number,) if each else (record.layer, record.port, record.leaf, record.rank)
        groups.setdefault(key, []).append(record)
    rows = []
    for number, group in enumerate(groups.values()):
        if progress is not None:
            progress(number, len(groups))
        rows.append(row_of(Series(tuple(group), summary_table(group))))
    return rows


def row_of(series: Series, over_steps: dict[str, Any] | None = None) -> LayerRow:
    """One row for all moments of a place."""
    records, first = series.records, series.first
    single = len(records) == 1
    return LayerRow(
        layer=first.layer,
        alias=first.alias,
        type=first.type,
        port=first.port,
        leaf=first.leaf,
        shapes=tuple(dict.fromkeys(record.shape for record in records)),
        dtypes=tuple(dict.fromkeys(record.dtype for record in records)),
        records=len(records),
        stored=all(record.stored for record in records),
        epoch=first.epoch if single else None,
        batch=first.batch if single else None,
        call=first.call if single else None,
        rank=first.rank,
        summary=series.summary(),
        provenance=first.provenance,
        over_steps=over_steps,
    )


def header(recording: Recording) -> str:
    """One line that says what the recording is of."""
    manifest = recording.manifest
    name = str(manifest.target.get("class") or manifest.target.get("spec") or "")
    parts = [
        text.clean(recording.path),
        recording.status,
        text.clean(name),
        text.clean(str(manifest.target.get("runtime") or "")),
        f"mode {text.clean(manifest.mode)}" if manifest.mode else "",
        text.clean(manifest.device),
        text.plural(len(recording), "layer"),
        text.size(recording.nbytes),
    ]
    return " · ".join(part for part in parts if part)


def layers_table(rows: Sequence[LayerRow], *, each: bool = False) -> Table:
    """The rows as a table; a column that would say the same everywhere is left out."""
    optional = {
        "alias": any(row.alias not in (None, row.layer) for row in rows),
        "port": any(row.port != "output" for row in rows),
        "leaf": any(row.leaf for row in rows),
        "rank": any(row.rank for row in rows),
        "epoch": each and any(row.epoch for row in rows),
        "batch": each and any(row.batch for row in rows),
        "call": each and any(row.call for row in rows),
        "records": any(row.records > 1 for row in rows),
        "name by": any(row.provenance != "hook" for row in rows),
    }
    columns = [("layer", "left")]
    columns += [("alias", "left")] if optional["alias"] else []
    columns += [("name by", "left")] if optional["name by"] else []
    columns += [("type", "left")]
    columns += [(name, "left") for name in ("port", "leaf") if optional[name]]
    numbers = [n for n in ("rank", "epoch", "batch", "call", "records") if optional[n]]
    columns += [(name, "right") for name in numbers]
    columns += [("shape", "left"), ("dtype", "left")]
    columns += [(name, "right") for name in ("mean", "std", "min", "max", "NaN", "Inf")]
    result = table(*columns)
    for row in rows:
        result.add_row(*_cells(row, optional, numbers))
    return result


def _cells(row: LayerRow, optional: dict[str, bool], numbers: Sequence[str]) -> list[Any]:
    s = row.summary
    cells: list[Any] = [text.layer_name(row.layer)]
    cells += [text.clean(row.alias or "")] if optional["alias"] else []
    cells += [_known_by(row)] if optional["name by"] else []
    cells += [text.clean(row.type)]
    cells += [text.clean(getattr(row, name)) for name in ("port", "leaf") if optional[name]]
    cells += [str(getattr(row, name)) for name in numbers]
    cells += [_shapes(row.shapes), ", ".join(row.dtypes)]
    cells += [text.number(value) for value in (s.mean, s.std, s.min, s.max)]
    return [*cells, bad(s.nan), bad(s.posinf + s.neginf)]


def _known_by(row: LayerRow) -> Any:
    """How the layer's name is known: a guess stands out."""
    from rich.text import Text

    return Text(brief(row.provenance), style="yellow" if row.provenance == "inferred" else "")


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    if len(shapes) <= 2:
        return " / ".join(text.shape(extents) for extents in shapes)
    ends = f"{text.shape(shapes[0])} … {text.shape(shapes[-1])}"
    return f"{ends} ({len(shapes)} shapes)"


def bad(value: int) -> Any:
    """A count that should be zero: red when it is not."""
    from rich.text import Text

    return Text(text.count(value), style="bold red" if value else "dim")


def findings_table(findings: Sequence[Finding]) -> Table:
    """Findings, a line each."""
    from rich.text import Text

    result = table(("severity", "left"), ("layer", "left"), ("kind", "left"), ("finding", "left"))
    for finding in findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        result.add_row(
            Text(finding.severity, style=style),
            text.layer_name(finding.layer),
            finding.kind,
            text.clean(finding.text),
        )
    return result
