"""Does it find the bug? Planted ones in many architectures, and pairs in which nothing is wrong.

    python benchmarks/diagnosis.py [--kind WORDS] [--model NAME] [--group NAME] [--page FILE]

Every kind of bug is planted at three depths of a demo model, a Llama, a BERT and a Mamba, and many
of them, with bugs of their own, in 48 other models (all small, with seeded weights; nothing is
downloaded). Of each we ask: is the first divergence where the bug shows first, is the culprit that
blame names the innermost layer in which the bug sits, was a layer named that did nothing wrong,
and is the best hint of the right kind, where a hint can be asked for. `--known` runs what is known
to be missed, `--say` prints what was said. `--page docs/diagnosis.md` writes the tables between the
marks of that page.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "diagnosis"))

from bugs import DEPTHS, Case, cases  # noqa: E402
from clean import Pair, pairs  # noqa: E402
from diagnosing import Outcome, Workshop, failed, workshop  # noqa: E402
from known import KNOWN  # noqa: E402
from zoo import ARCHITECTURES  # noqa: E402

AIMS = "Aims: first divergence 100 %, blame 95 %, false blame 0 %, hint 80 %."
HEAD = (
    "cases",
    "first divergence",
    "blame",
    "blame, bisect",
    "false blame",
    "hint of blame",
    "hint of compare",
    "hint not asked for",
)
PRECISIONS = ("bf16", "int8 weights")
# In a lower precision their routers choose other experts, so no bug in them has one right answer.
UNLIKE = ("experts", "qwen3_moe", "jamba")
BEGIN, END = "<!-- made by benchmarks/diagnosis.py -->", "<!-- end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    groups = sorted({model.group for model in ARCHITECTURES.values()})
    parser.add_argument("--kind", default="", help="only kinds that contain these words")
    parser.add_argument("--model", default="", choices=["", *ARCHITECTURES], help="only this one")
    parser.add_argument("--json", type=Path, help="also write every outcome here")
    parser.add_argument("--page", type=Path, help="write the tables between the marks of this page")
    parser.add_argument("--jobs", type=int, default=2, help="processes to run in")
    parser.add_argument("--group", default="", choices=["", *groups], help="only these models")
    parser.add_argument("--known", action="store_true", help="only what is known to be missed")
    parser.add_argument("--say", action="store_true", help="also print what was said of each")
    options = parser.parse_args()

    def wanted(item: Case | Pair) -> bool:
        model = item.architecture
        return (
            options.kind in item.kind
            and (not options.known or str(item) in KNOWN)
            and options.model in ("", model.name)
            and options.group in ("", model.group)
        )

    began = time.perf_counter()
    with workshop() as shop, _pool(options.jobs, shop) as pool:
        outcomes = _run(pool, [item for item in (*cases(), *pairs()) if wanted(item)])
        bugs = [o for o in outcomes if isinstance(o.case, Case) and _again(o.case)]
        for precision in PRECISIONS:
            asked = [o for o in bugs if precision == "bf16" or o.case.architecture.core]
            shown = [within(o.case, precision) for o in asked if shop.shows(o, precision)]
            outcomes += _run(pool, shown)
    text = page(outcomes)
    print(text)
    if options.say:
        print("\n".join(_said(o) for o in outcomes))
    print(f"{len(outcomes)} in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    if options.json:
        rows = [{**_fields(o), "case": str(o.case), "kind": o.kind} for o in outcomes]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        write_page(options.page, text)


_shop: Workshop | None = None


def _pool(jobs: int, shop: Workshop) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, context, initializer=_open, initargs=(shop.folder,))


def _open(folder: Path) -> None:
    """In each process: a folder of its own inside the one that is removed at the end."""
    global _shop
    torch.set_num_threads(1)
    own = folder / str(os.getpid())
    own.mkdir()
    _shop = Workshop(own)


def _diagnose(item: Case | Pair) -> Outcome:
    assert _shop is not None
    try:
        return _shop.diagnose(item)
    except Exception as error:  # the bench goes on, and says so
        return failed(item, error)


def _run(pool: ProcessPoolExecutor, items: Sequence[Case | Pair]) -> list[Outcome]:
    outcomes = []
    for outcome in pool.map(_diagnose, items):
        outcomes.append(outcome)
        print(f"\r{len(outcomes)}/{len(items)} {outcome.case!s:60.60}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return outcomes


def _again(case: Case) -> bool:
    """Whether a bug is planted in candidates of lower precisions too."""
    core = case.architecture.core and case.depth == "middle" and len(case.bug.models) > 1
    return core or (case.bug.shows == "?" and case.architecture.name not in UNLIKE)


def within(case: Case | Pair, precision: str) -> Case:
    """The same bug in a candidate of a lower precision than the reference."""
    assert isinstance(case, Case)
    return replace(case, precision=precision)


# The tables.


def page(outcomes: Sequence[Outcome]) -> str:
    """Everything that is printed, as Markdown."""
    every = [o for o in outcomes if isinstance(o.case, Case)]
    planted = [o for o in every if not _precision(o)]
    clean = [o for o in outcomes if isinstance(o.case, Pair)]
    parts = [AIMS]
    if planted:
        parts += [
            _table("planted bugs", planted, lambda o: o.kind),
            _table("by group", planted, lambda o: o.case.architecture.group),
            _table("by model", planted, lambda o: o.case.architecture.name),
            _table(
                "by depth", planted, lambda o: getattr(o.case, "depth", ""), ("before", *DEPTHS)
            ),
        ]
    for precision in PRECISIONS:
        rounded = [o for o in every if _precision(o) == precision]
        if rounded:
            title = f"bugs in a candidate in {precision}"
            parts.append(_table(title, rounded, lambda o: o.case.architecture.name))
    if clean:
        parts.append(_table("clean pairs", clean, lambda o: o.kind))
    missed = [line for o in outcomes for line in _misses(o)]
    parts.append("\n".join(["Missed:", "", *missed]) if missed else "Missed: nothing.")
    return "\n\n".join(parts)


def _precision(outcome: Outcome) -> str:
    return getattr(outcome.case, "precision", "")


def _table(
    title: str,
    outcomes: Sequence[Outcome],
    group: Callable[[Outcome], str],
    order: Iterable[str] = (),
) -> str:
    names = list(dict.fromkeys([*order, *map(group, outcomes)]))
    lines = [f"| {title} | {' | '.join(HEAD)} |", "|---|" + "---:|" * len(HEAD)]
    for name in names:
        chosen = [o for o in outcomes if group(o) == name]
        if chosen:
            lines.append(_row(name, chosen))
    lines.append(_row("**all**", outcomes))
    return "\n".join(lines)


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    cells = (
        str(len(outcomes)),
        _percent(o.first_right for o in outcomes),
        _percent(o.blame_right for o in outcomes),
        _percent(o.bisect_right for o in outcomes if o.bisect_right is not None),
        _percent(o.false_blame for o in outcomes),
        _percent(o.hint_right for o in outcomes if o.hint_right is not None),
        _percent(o.first_hint_right for o in outcomes if o.first_hint_right is not None),
        _percent(o.false_hint for o in outcomes if o.hint_right is None),
    )
    return f"| {name} | {' | '.join(cells)} |"


def _percent(right: Iterable[bool]) -> str:
    answers = list(right)
    if not answers:
        return "-"
    return f"{100 * sum(answers) / len(answers):.3g} %"


def _misses(o: Outcome) -> list[str]:
    if o.failure:
        return [f"- {o.case}: raises {o.failure}"]
    lines = []
    if not o.first_right:
        lines.append(f"first divergence {_name(o.first)} instead of {_name(o.expected_first)}")
    if not o.blame_right:
        lines.append(
            f"blames {_name(o.culprit)} instead of {_name(o.expected_culprit)} "
            f"(largest share {o.share:.2f})"
        )
    if o.bisect_right is False:
        lines.append(f"bisection blames {_name(o.bisected)} instead of {_name(o.expected_culprit)}")
    if o.hint_right is False:
        lines.append(f"hint of blame: {o.hint or 'none'}")
    if o.first_hint_right is False:
        lines.append(f"hint of compare: {o.first_hint or 'none'}")
    return [f"- {o.case}: {line}" for line in lines]


def _said(o: Outcome) -> str:
    """What the library says of one case, beside what is right."""
    lines = [
        f"\n{o.case}",
        f"  right:   first {_name(o.expected_first)}, fault of {_name(o.expected_culprit)}",
        f"  compare: {o.said}",
        f"  blame:   {o.sentence}",
        f"  causes:  {o.hint or 'none'} by blame, {o.first_hint or 'none'} by compare",
    ]
    return "\n".join(lines)


def _name(layer: str | None) -> str:
    return "nothing" if layer is None else f"`{layer}`" if layer else "the model"


def _fields(outcome: Outcome) -> dict[str, object]:
    return {item.name: getattr(outcome, item.name) for item in fields(outcome)}


def write_page(path: Path, text: str) -> None:
    """Put the tables between the marks of a page."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, behind = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{behind}")


if __name__ == "__main__":
    main()
