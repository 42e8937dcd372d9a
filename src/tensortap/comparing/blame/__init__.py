"""Who made the error: the reference's tensors are put into the live candidate, layer by layer."""

from .results import Blame, BlamedLayer

__all__ = ["Blame", "BlamedLayer"]
