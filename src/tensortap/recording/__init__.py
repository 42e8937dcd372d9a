"""The recording on disk: its format, its writer, its reader."""

from .health import Finding, Limits, check
from .reader import Layer, Record, Recording, open
from .schema import Manifest, Row, Structure
from .writer import Writer

__all__ = [
    "Finding",
    "Layer",
    "Limits",
    "Manifest",
    "Record",
    "Recording",
    "Row",
    "Structure",
    "Writer",
    "check",
    "open",
]
