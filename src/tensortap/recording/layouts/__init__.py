"""Layouts: trees of plain tensor files, as the documents keep them, to and from recordings.

pt    document 000    one bare tensor a layer, and metadata.pt
npy   document 003    one array a block and mode, and statistics as JSON
npz   document 002    input and output of the first layer, all modes in one file
"""

from __future__ import annotations

from .base import (
    Entry,
    Exported,
    ExportOptions,
    Layout,
    LeftOut,
    Skipped,
    Tree,
    detect,
    get,
    names,
    register,
)
from .importing import Imported, import_read, import_tree
from .npy import NpyLayout
from .npz import NpzLayout
from .pt import PtLayout

__all__ = [
    "Entry",
    "ExportOptions",
    "Exported",
    "Imported",
    "Layout",
    "LeftOut",
    "Skipped",
    "Tree",
    "detect",
    "get",
    "import_read",
    "import_tree",
    "names",
    "register",
]

for _layout in (PtLayout(), NpyLayout(), NpzLayout()):
    register(_layout)
