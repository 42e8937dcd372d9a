"""`tensortap record --plan`: what would be recorded, without running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .aside import aside
from .common import note, print_json, print_notes, say

if TYPE_CHECKING:
    from ..reporting.plans import TargetPlan
    from ..targets import Target
    from .running import Settings

__all__ = ["Planned", "plan_of"]


@dataclass(frozen=True)
class Planned:
    """A plan, and what it is the plan of."""

    plan: TargetPlan
    target: Target
    settings: Settings

    def to_dict(self) -> dict[str, Any]:
        return self.plan.to_dict(keep=self.settings.keep)

    def show(self, as_json: bool = False, label: str = "") -> None:
        """Print it; notes begin with `label`."""
        if as_json:
            print_json(self.to_dict())
        else:
            self._print()
        print_notes(f"{label}{text}" for text in self.plan.notes)
        if self.settings.grads:
            note(
                f"{label}Gradients come on top: as many bytes again as the outputs, and inputs, "
                "they are of."
            )

    def _print(self) -> None:
        from ..reporting.console import print_table, stdout
        from ..reporting.plans import plan_table

        settings, last = self.settings, self.plan.last_layer
        print_table(stdout(), plan_table(self.plan))
        say(self.plan.sentence(keep=settings.keep))
        if settings.early_stop and not settings.grads and self.target.run is None and last:
            say(f"The model would run no further than '{last}' (--no-early-stop to run on).")


def plan_of(target: Target, settings: Settings) -> Planned:
    """What recording this target would come to."""
    from ..reporting.plans import plan_target

    with aside():
        plan = plan_target(
            target,
            settings.layers,
            inputs=settings.inputs,
            outputs=settings.outputs,
            grads=settings.grads,
            options=settings.compiled,
        )
    return Planned(plan, target, settings)
