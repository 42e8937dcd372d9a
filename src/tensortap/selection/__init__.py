"""Which layers: from what the user typed to modules of a model.

`sites` knows the places of a model and their names, `structure` the parts that have a role,
`select` reads patterns. See `select` for the language.
"""

from __future__ import annotations

from .select import Selection, select
from .sites import Site, sites
from .structure import structure

__all__ = ["Selection", "Site", "select", "sites", "structure"]
