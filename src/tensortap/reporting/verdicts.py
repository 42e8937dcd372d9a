"""What the table and the screen of a comparison share: colours of verdicts, a cosine in digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import text

if TYPE_CHECKING:
    from ..numerics.difference import Difference

__all__ = ["GOOD_GRADES", "GRADES_ARE", "STYLES", "cosine"]

GOOD_GRADES = ("very close", "good")
GRADES_ARE = (
    "The grade is the documents' word for the MSE alone. The verdict asks whether rounding "
    "explains the error: a layer can be very close and diverged."
)

STYLES = {
    "identical": "green",
    "within": "green",
    "missing": "yellow",
    "incomparable": "bold red",
    "diverged": "bold red",
}
_NEAR_ONE = 1e-3


def cosine(difference: Difference) -> str:
    """The cosine; near 1 as what it lacks, where the digits are."""
    distance = difference.cosine_distance
    if 0 < distance < _NEAR_ONE:
        return f"1 - {distance:.1e}"
    return text.number(difference.cosine, 4)
