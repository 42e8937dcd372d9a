"""Blames made by hand: one of each kind, and one with all that could go wrong in it."""

from __future__ import annotations

import math
from typing import Any

from tensortap.comparing.blame.results import Blame, BlamedLayer
from tensortap.comparing.causes.cause import Cause

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "\"quoted\" 'twice' & more",
    "ünï中文.层.0",
    "line\nbreak\r\u2028\u202e",
    "{{data}}",
    "\udcff lone",
    "",
    "constructor",
    "__proto__",
)


def layer(name: str, share: float = math.nan, made: float = 0.0, **more: Any) -> BlamedLayer:
    """A layer that is handed 1 % and hands on what it makes besides."""
    handed = more.pop("handed", 0.01)
    told: dict[str, Any] = {
        "type": "Block",
        "made_here": made,
        "accumulated": math.hypot(made, handed),
        "handed": handed,
        "amplification": 1.0,
        "share": share,
        "floor": 1e-6,
        "how": "patched",
        **more,
    }
    return BlamedLayer(name, **told)


def planted(**more: Any) -> Blame:
    """The demo's bug: one linear inside one of eight blocks, and a descent of two levels."""
    rows: list[BlamedLayer] = []
    for at in range(8):
        handed = 0.0 if at < 5 else 0.013 * 0.9 ** (at - 5)
        made = 0.0141 if at == 4 else 0.0
        share = 0.964 if at == 4 else 0.006 * (at > 4)
        rows.append(layer(f"blocks.{at}", share, made, handed=handed))
    block, mlp = "blocks.4", "blocks.4.mlp"
    within: dict[str, Any] = {"how": "within", "handed": 0.0}
    rows += [
        layer(f"{block}.norm1", 0.0, type="RMSNorm", parent=block, **within),
        layer(f"{block}.attention", 0.0, type="Attention", parent=block, **within),
        layer(f"{block}.norm2", 0.0, type="RMSNorm", parent=block, **within),
        layer(mlp, 0.964, 0.02, type="MLP", parent=block, **within),
        layer(f"{mlp}.up", 0.0, type="Linear", parent=mlp, **within),
        layer(f"{mlp}.activation", 0.0, type="GELU", parent=mlp, **within),
        layer(f"{mlp}.down", 0.964, 0.02, type="Linear", parent=mlp, **within),
    ]
    told: dict[str, Any] = {
        "culprit": f"{mlp}.down",
        "share": 0.964,
        "final_error": 0.0121,
        "final_floor": 3e-6,
        "before": 0.0,
        "behind": 0.018,
        "causes": (Cause("factor", 0.9999, "output = 1.02 x reference", {"factor": 1.02}),),
        "forwards": 14,
        "limit": 19,
        "notes": ("The reference has no inputs for 'head'.",),
        **more,
    }
    return Blame("runs/fp32", "tensortap.demo:build --mode bug", tuple(rows), **told)


def even(layers: int = 24, **more: Any) -> Blame:
    """An error that builds up over all layers: nobody's fault."""
    rows = tuple(
        layer(f"model.layers.{at}", 1 / layers + 0.01 * (-1) ** at, 0.004, handed=0.004 * at**0.5)
        for at in range(layers)
    )
    told: dict[str, Any] = {"culprit": None, "share": 1 / layers + 0.01, **more}
    return Blame(
        "runs/fp32", "m.py:build", rows, final_error=0.02, final_floor=1e-6, forwards=51, **told
    )


def same() -> Blame:
    rows = tuple(layer(f"blocks.{at}", handed=0.0) for at in range(3))
    return Blame(
        "a",
        "b",
        rows,
        None,
        math.nan,
        final_error=0.0,
        final_floor=1e-6,
        final_verdict="identical",
        forwards=1,
        limit=9,
    )


def messy() -> Blame:
    """Shares below nothing and beyond all, numbers that are not, names that would be markup."""
    rows = [layer(name, 0.01 * at) for at, name in enumerate(HOSTILE)]
    rows += [
        layer("minus", -0.4, 0.1),
        layer("far.minus", -25.0, 0.1),
        layer("far.plus", 7.5, math.inf, accumulated=math.inf),
        layer("alone", note="cannot be run alone: <b>past</b>.", how="", made=math.nan),
        layer("lost.child", 0.2, parent="there is no such layer"),
        layer("itself", 0.1, parent="itself"),
        layer("inferred", 0.3, 1e-8, how="inferred"),
        BlamedLayer("nothing known"),
        layer(HOSTILE[0] + ".inner", 0.7, 0.2, parent=HOSTILE[0], how="within"),
    ]
    return Blame(
        "runs/<reference>",
        "candidate\udcff",
        tuple(rows),
        HOSTILE[0] + ".inner",
        0.7,
        final="<head>",
        final_leaf=".logits",
        final_error=math.inf,
        before=-0.1,
        behind=0.2,
        beside=0.3,
        causes=(Cause("factor", 0.5, "output = <b>2</b> x reference"), Cause("noise", 0.0, "no")),
        bisect=True,
        forwards=7,
        limit=9,
        warnings=("Beware of <this>.",),
        notes=("A note & another.",),
    )
