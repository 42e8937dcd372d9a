"""Compiled models inside other objects: found, tapped where they are held, put back."""

from .parts import find_parts
from .tap import InsideTap

__all__ = ["InsideTap", "find_parts"]
