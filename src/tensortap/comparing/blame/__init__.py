"""Who made the error: the reference's tensors are put into the live candidate, layer by layer."""

from .engine import blame
from .results import Blame, BlamedLayer

__all__ = ["Blame", "BlamedLayer", "blame"]
