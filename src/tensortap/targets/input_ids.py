"""Token ids from a file: `.json` (a list, or a list of rows), `.npy`, or text of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError
from ..recording.kinds import parse
from ..regular_files import read_regular

__all__ = ["check_range", "read_input_ids"]

_LARGEST = 256 << 20  # bytes
_FORMS = "a list of whole numbers, or a list of rows of equal length"


def read_input_ids(path: Path) -> Tensor:
    """The ids as one batch of rows; a text file has one row a line."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise OptionError(f"The --input-ids file {str(path)!r} {what}.")
    try:
        if path.suffix == ".npy":
            values: Any = np.load(path, allow_pickle=False).tolist()
        elif path.suffix == ".json":
            values = parse(read_regular(path, _LARGEST))
        else:
            lines = read_regular(path, _LARGEST).decode("utf-8").replace(",", " ").splitlines()
            values = [[int(word) for word in line.split()] for line in lines if line.strip()]
    except OSError as error:
        raise OptionError(
            f"The --input-ids file {str(path)!r} cannot be read: {error.strerror or error}."
        ) from error
    except (ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(
            f"The --input-ids file {str(path)!r} cannot be read: {reason}. Expected {_FORMS}."
        ) from error
    return torch.tensor(_rows(values, path), dtype=torch.int64)


def _rows(values: object, path: Path) -> list[list[int]]:
    if not isinstance(values, list) or not values:
        raise _misfit(path, "an empty list" if values == [] else type(values).__name__)
    rows = values if isinstance(values[0], list) else [values]
    for row in rows:
        if not isinstance(row, list) or not row:
            raise _misfit(path, "an empty row" if row == [] else "rows mixed with numbers")
        for value in row:
            if isinstance(value, bool) or not isinstance(value, int):
                raise _misfit(path, repr(value))
            if not -(2**63) <= value < 2**63:
                raise _misfit(path, f"the number {value}")
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise _misfit(path, f"rows of {lengths[0]} to {lengths[-1]} numbers")
    return rows


def _misfit(path: Path, got: str) -> OptionError:
    return OptionError(f"The --input-ids file {str(path)!r} holds {got}, expected {_FORMS}.")


def check_range(ids: Tensor, vocabulary: int | None, where: str) -> None:
    """Refuse ids that the embedding has no row for, which would fail deep inside the model."""
    bad = ids < 0 if vocabulary is None else (ids < 0) | (ids >= vocabulary)
    places = bad.nonzero()
    if len(places):
        row, column = places[0].tolist()
        limit = "from 0" if vocabulary is None else f"from 0 to {vocabulary - 1} (vocab_size)"
        raise OptionError(
            f"{where} has the id {int(ids[row, column])} at row {row}, position {column}; "
            f"the model takes ids {limit}."
        )
