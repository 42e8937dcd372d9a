"""Calls of a user's own module that come to a recording instead.

What stands in the instance is found before what stands in its class, so a `forward` put there is
what a call runs. Taking it away again leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import OptionError

__all__ = ["divert_forward"]

_MISSING = object()


def divert_forward(
    own: dict[str, Any], call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
) -> Callable[[], None]:
    """Let the `forward` of an instance, of which `own` are the attributes, run `call`.

    Two recordings cannot share a call: each runs the model with taps of its own, and it would run
    twice.
    """
    before = own.get("forward", _MISSING)
    recorder = getattr(call, "__self__", None)
    if recorder is not None and getattr(before, "recorder", None) is not None:
        raise OptionError(
            "This compiled model is being recorded already, and its calls can go to one recording "
            "alone. End the other one first, or select the layers of both in one."
        )

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    forward.recorder = recorder  # type: ignore[attr-defined]
    own["forward"] = forward

    def undo() -> None:
        if before is _MISSING:
            own.pop("forward", None)
        else:
            own["forward"] = before

    return undo
