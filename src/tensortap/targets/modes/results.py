"""What recording many modes comes to: a row a mode, also for those that failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

from ...errors import OptionError
from ...recording.html import table

__all__ = ["ModeStep", "ModesInterrupted", "RecordedMode", "RecordedModes", "Status"]

Status = Literal["recorded", "kept", "failed"]


@dataclass(frozen=True)
class RecordedMode:
    """One mode: its recording and what there is in it, or the problem that kept it from being.

    `checks` is how many self-checks a compiled model went through, and `failed_checks` what those
    found that failed; `compared` says in short how a mode that was recorded against another
    recording compares with it.
    """

    mode: str
    path: str
    status: Status
    problem: str | None = None
    seconds: float = 0.0
    layers: int = 0
    records: int = 0
    nbytes: int = 0
    notes: tuple[str, ...] = ()
    checks: int = 0
    failed_checks: tuple[str, ...] = ()
    compared: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        """Whether there is a recording to be read."""
        return self.status != "failed"

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it."""
        data = asdict(self)
        checks, failed = data.pop("checks"), len(self.failed_checks)
        return {
            **data,
            "notes": list(self.notes),
            "self_checks": {"passed": checks - failed, "failed": failed},
            "failed_checks": list(self.failed_checks),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RecordedMode:
        """The row that `to_dict` wrote: rows come from other processes that way."""
        checks = sum(data["self_checks"].values())
        lists = {key: tuple(data[key]) for key in ("notes", "failed_checks")}
        rest = {key: value for key, value in data.items() if key != "self_checks"}
        return cls(**{**rest, **lists, "checks": checks})


@dataclass(frozen=True)
class RecordedModes:
    """The recordings of a target's modes, side by side in one folder.

    modes = tap.record_modes("model.py:build", "runs", modes="fp32,int8")
    modes["int8"].path              # one row
    bool(modes)                     # False when any mode failed
    print(modes)                    # the table
    """

    folder: str
    modes: tuple[RecordedMode, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[RecordedMode, ...]:
        """The modes of which there is no recording, or half of one."""
        return tuple(row for row in self.modes if row.status == "failed")

    def __bool__(self) -> bool:
        """Whether every mode has its recording."""
        return not self.failed

    def __len__(self) -> int:
        return len(self.modes)

    def __iter__(self) -> Iterator[RecordedMode]:
        return iter(self.modes)

    def __getitem__(self, mode: str) -> RecordedMode:
        for row in self.modes:
            if row.mode == mode:
                return row
        names = [row.mode for row in self.modes]
        near = difflib.get_close_matches(str(mode), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"There is no mode {mode!r} among {', '.join(names)}.{hint}")

    def to_dict(self) -> dict[str, Any]:
        """As `record --modes … --json` prints it."""
        return {
            "folder": self.folder,
            "modes": [row.to_dict() for row in self.modes],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from ...reporting.recorded_modes import modes_text

        return modes_text(self)

    def _repr_html_(self) -> str:
        columns = ["mode", "status", "layers", "records", "nbytes", "seconds", "problem"]
        rows = [
            ["" if (value := getattr(row, name)) is None else str(value) for name in columns]
            for row in self.modes
        ]
        return f"<p>{escape(self.folder)}</p>" + table(columns, rows)


@dataclass(frozen=True)
class ModeStep:
    """How far one mode is: said to whoever watches while modes are recorded.

    `batch` is how many batches are done of `batches`; both are None until the model is there.
    """

    mode: str
    number: int
    of: int
    state: Literal["waiting", "loading", "running", "recorded", "kept", "failed"]
    batch: int | None = None
    batches: int | None = None


class ModesInterrupted(KeyboardInterrupt):
    """Somebody pressed Ctrl-C: `recorded` has the modes that were done until then."""

    def __init__(self, recorded: RecordedModes, left: tuple[str, ...]) -> None:
        super().__init__("interrupted")
        self.recorded = recorded
        self.left = left
