"""What is held in the place of a compiled part that cannot be diverted itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["StandIn"]


class StandIn:
    """Runs a tapped program when it is called, and is the original in everything else."""

    __slots__ = ("_call", "_original")

    def __init__(
        self, original: Any, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> None:
        object.__setattr__(self, "_original", original)
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() asks for it
        return type(self._original)

    def __repr__(self) -> str:
        return repr(self._original)

    def __copy__(self) -> Any:
        return self._original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return copy.deepcopy(self._original, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._original.__reduce_ex__(protocol)

    def module(self, *args: Any, **kwargs: Any) -> Any:
        """An exported program is not called itself: what it makes is."""
        made = self._original.module(*args, **kwargs)
        return StandIn(made, self._call)
