"""What a recording against another keeps, where it stops, and what it costs the model: nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import BUGS, make_inputs, make_model, plant
from torch import Tensor, nn

import tensortap as tap
from forked_commands import Commands
from schemas import DOCS, validate

Run = Callable[..., Any]
GAIN = next(bug for bug in BUGS if bug.name == "2 % gain")


@pytest.fixture
def reference(run: Run) -> tap.Recorder:
    return run(make_model(), make_inputs(0), make_inputs(1), layers="all", inputs=True)


def broken() -> nn.Module:
    return plant(make_model(), GAIN)


def test_only_what_differs_is_kept(run: Run, reference) -> None:
    live = run(broken(), make_inputs(0), make_inputs(1), layers="all", against=reference.path)
    recording = tap.open(live.path)
    kept = {(r.layer, r.port, r.batch) for r in recording.records if r.stored}
    verdicts = {row.layer: row.verdict for row in live.comparison.layers}
    outputs = {
        (layer, "output", b) for layer, v in verdicts.items() if v == "diverged" for b in (0, 1)
    }
    assert kept == outputs | {(GAIN.layer, "input", 0)}
    assert recording.layers == tap.open(reference.path).layers  # the overview is complete
    for record in recording.records:
        assert record.summary.count == torch.Size(record.shape).numel()
    assert 0 < live.tally.kept < live.tally.seen
    first = live.comparison.first_divergence
    assert (first.layer, first.origin) == (GAIN.layer, "made here")  # by the inputs that were held
    assert [cause.kind for cause in first.causes][:1] == ["factor"]
    with pytest.raises(tap.TapError, match="which it was recorded against"):
        recording["embedding"].output  # noqa: B018


def test_what_agrees_takes_a_few_hundred_bytes_a_tensor(run: Run, reference) -> None:
    live = run(make_model(), make_inputs(0), make_inputs(1), layers="all", against=reference.path)
    recording = tap.open(live.path)
    assert live.comparison.same
    assert not any(record.stored for record in recording.records)
    assert live.tally.kept == 0
    assert recording.nbytes / len(recording.records) < 600


def test_full_and_summary(run: Run, reference) -> None:
    options = {"layers": "all", "against": reference.path}
    full = tap.open(run(broken(), make_inputs(0), full=True, **options).path)
    assert all(record.stored for record in full.records if record.port == "output")
    slim = run(broken(), make_inputs(0), keep="summary", **options)
    assert not any(record.stored for record in tap.open(slim.path).records)
    assert slim.comparison.first_divergence.layer == GAIN.layer


def test_the_comparison_lies_beside_the_recording(run: Run, reference) -> None:
    live = run(broken(), make_inputs(0), make_inputs(1), layers="all", against=reference.path)
    written = json.loads((Path(live.path) / "comparison.json").read_text())
    assert written == json.loads(live.comparison.to_json())
    validate(written, "comparison")
    manifest = json.loads((Path(live.path) / "recording.json").read_text())
    schema = json.loads((DOCS / "recording.schema.json").read_text())
    assert manifest["selection"].keys() <= schema["properties"]["selection"]["properties"].keys()
    assert manifest["selection"]["against"] == reference.path
    assert manifest["selection"]["first_divergence"]["layer"] == GAIN.layer


def test_it_is_known_while_it_runs(tmp_path, reference) -> None:
    with (
        torch.no_grad(),
        tap.record(broken(), tmp_path / "r", layers="all", against=reference.path) as rec,
    ):
        with pytest.raises(tap.TapError):
            rec.comparison  # noqa: B018
        rec.run(make_inputs(0))
        assert rec.comparison.first_divergence.layer == GAIN.layer
        rec.step()
        rec.run(make_inputs(1))
    assert rec.comparison.first_divergence.main.moments == 2


def test_other_batches_are_said(run: Run, reference) -> None:
    live = run(make_model(), make_inputs(0), layers="all", against=reference.path)
    assert live.comparison.same
    assert any("has 2 batches, this run 1" in text for text in live.comparison.notes)
    three = [make_inputs(seed) for seed in range(3)]
    more = run(make_model(), *three, layers="all", against=reference.path)
    assert any("has 2 batches, this run 3" in text for text in more.comparison.notes)
    assert "batch 2 only in the candidate" in more.comparison["embedding"].note


@pytest.mark.parametrize("inside", [True, False], ids=["run", "model"])
def test_it_stops_at_the_first_divergence(tmp_path, reference, inside: bool) -> None:
    model = broken()
    ran: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, o, n=name: ran.append(n))
    before = {name: len(m._forward_hooks) for name, m in model.named_modules()}
    with (
        torch.no_grad(),
        tap.record(
            model, tmp_path / "r", layers="all", inputs=True, against=reference.path, stop=True
        ) as rec,
    ):
        for seed in range(2):
            if inside:
                assert rec.run(make_inputs(seed)) is None
            else:
                model(make_inputs(seed))
            rec.step()
    assert rec.stopped == GAIN.layer
    assert ran[-1] == GAIN.layer
    recording = tap.open(tmp_path / "r")
    assert recording.status == "complete"
    assert recording.manifest.selection["stopped_at"] == GAIN.layer
    assert any("stopped at the first divergence" in text for text in recording.notes)
    assert not any("Nothing was heard" in text for text in recording.notes)
    layer = recording[GAIN.layer]
    assert {r.port for r in layer.records if r.stored} == {"input", "output"}
    late = rec.comparison["head"]
    assert late.verdict == "missing" and "stopped" in late.note
    assert rec.comparison.first_divergence.layer == GAIN.layer
    assert {name: len(m._forward_hooks) for name, m in model.named_modules()} == before
    assert model(make_inputs(0)).shape[0] == make_inputs(0).shape[0]


def test_a_run_that_agrees_is_not_stopped(tmp_path, reference) -> None:
    with (
        torch.no_grad(),
        tap.record(
            make_model(), tmp_path / "r", layers="all", against=reference.path, stop=True
        ) as rec,
    ):
        assert isinstance(rec.run(make_inputs(0)), Tensor)
    assert rec.stopped is None
    assert tap.open(tmp_path / "r").manifest.selection["stopped_at"] is None


def test_where_it_cannot_stop_it_says_so(tmp_path, reference) -> None:
    model = broken()
    with tap.record(
        model, tmp_path / "r", layers="blocks", grads=True, against=reference.path, stop=True
    ) as rec:
        model(make_inputs(0)).mean().backward()
    assert rec.stopped is None
    assert any("cannot be left early" in text for text in rec.notes)


def test_an_error_of_the_model_is_not_swallowed(tmp_path, reference) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        tap.record(make_model(), tmp_path / "r", layers="all", against=reference.path, stop=True),
    ):
        raise KeyboardInterrupt
    assert tap.open(tmp_path / "r").status == "failed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"inputs": True}, {"full": True}, {"keep": "sketch"}])
def test_what_the_model_computes_does_not_change(tmp_path, run: Run, dtype, options) -> None:
    def trained(path: Path | None) -> list[Tensor]:
        model = plant(make_model().to(dtype), GAIN)
        torch.manual_seed(7)
        if path is None:
            output = model(make_inputs(0))
        else:
            with tap.record(model, path, layers="all", against=reference.path, **options) as rec:
                output = model(make_inputs(0))
            assert rec.failure is None
        output.float().square().mean().backward()
        return [output, torch.rand(3), *(p.grad for p in model.parameters())]

    reference = run(make_model(), make_inputs(0), layers="all", inputs=True)
    for ours, theirs in zip(trained(tmp_path / "r"), trained(None), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": True}, "against=RUN"),
        ({"rules": "x: mse < 1"}, "against=RUN"),
        ({"against": "nowhere"}, "There is no recording at nowhere"),
        ({"against": "REFERENCE", "layers": "type:GELU"}, "None of the 4 layers"),
        ({"against": "REFERENCE", "map": "a"}, "is not of the form"),
        ({"against": "REFERENCE", "preset": "x"}, "preset"),
        ({"against": "REFERENCE", "floor": "REFERENCE"}, "is the reference itself"),
    ],
)
def test_mistakes_are_sentences_and_leave_nothing(tmp_path, run: Run, options, message) -> None:
    reference = run(make_model(), make_inputs(0), layers="blocks")
    given = {k: reference.path if v == "REFERENCE" else v for k, v in options.items()}
    with pytest.raises(tap.TapError, match=message):
        with tap.record(make_model(), tmp_path / "r", **given):
            pass
    assert not (tmp_path / "r").exists()


def test_the_reference_is_not_written_over(run: Run) -> None:
    reference = run(make_model(), make_inputs(0), layers="blocks")
    with pytest.raises(tap.TapError, match="where the new recording should go"):
        tap.record(make_model(), reference.path, against=reference.path, overwrite=True)
    assert tap.open(reference.path).layers


def test_a_recording_against_nothing_has_no_comparison(run: Run) -> None:
    with pytest.raises(tap.TapError, match="compared with nothing"):
        run(make_model(), make_inputs(0)).comparison  # noqa: B018


def test_inputs_beyond_the_budget_are_judged_by_their_summaries(run: Run) -> None:
    wide = nn.Sequential(nn.ReLU(), nn.Identity())
    x = torch.randn(1 << 17)  # half a megabyte, of a budget of which a quarter may be held
    reference = run(wide, x, layers="all", inputs=True)
    live = run(wide, x, layers="all", inputs=True, against=reference.path, budget=1 << 20)
    assert live.comparison.same
    assert any("too large to hold" in text for text in live.notes)
    outputs = [p for row in live.comparison.layers for p in row.parts if p.port == "output"]
    assert {part.verdict for part in outputs} == {"identical"}


# glibc serves large blocks from its heap once one of that size was freed, and then keeps what is
# freed in the middle of it. With a fixed threshold, the memory counted is the memory held.
_MEMORY = """
import ctypes, sys, torch, tensortap as tap
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
torch.set_num_threads(1)
folder, count = sys.argv[1], 24
def made():
    return torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Identity())
model = torch.nn.Sequential(*[made() for _ in range(count)])
x = torch.randn(1 << 21)
options = {"layers": "all", "inputs": True}
with torch.no_grad(), tap.record(model, folder + "/a", budget=1 << 24, **options):
    model(x)
model[3][0] = torch.nn.GELU()
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("RssAnon")][0]
base, most = anonymous(), 0
def look(*_):
    global most
    most = max(most, anonymous())
for m in model.modules():
    m.register_forward_hook(look)
options |= {"budget": 1 << 26, "against": folder + "/a"}
with torch.no_grad(), tap.record(model, folder + "/b", **options) as rec:
    model(x)
print((most - base) // 1024, rec.comparison.first_divergence.layer)
"""


def test_no_more_memory_than_the_budget(tmp_path, forked: Commands) -> None:
    done = forked.python(_MEMORY, tmp_path)
    assert done.code == 0, done.stderr
    megabytes, layer = done.stdout.split()
    assert layer == "3.0"
    # 50 layers of 8 MB; the model itself holds two of them.
    assert int(megabytes) < 64 + 16, done.stdout


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 1.3


def test_a_layer_that_is_wrong_in_its_backward_alone(tmp_path: Path) -> None:
    def trained(name: str, wrong: bool, **options: Any) -> tap.Recorder:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if wrong:
            inner = model[1][1].forward
            model[1][1].forward = lambda x: inner(_Backward.apply(x))
        with tap.record(
            model, tmp_path / name, layers="all", inputs=True, grads=True, **options
        ) as rec:
            for _ in range(2):
                model(x).square().mean().backward()
                rec.step()
        assert rec.failure is None
        return rec

    trained("good", False)
    after = tap.compare(tmp_path / "good", trained("full", True).path)
    live = trained("live", True, against=tmp_path / "good")
    assert after.first_divergence is not None and after.first_divergence.layer == "1.1"
    assert live.comparison.first_divergence.layer == "1.1"
    recording = tap.open(tmp_path / "live")
    said = recording.manifest.selection["first_divergence"]
    assert said == {"layer": "1.1", "epoch": 0, "batch": 0, "call": 0}
    kept = {r.port for r in recording["1.1"].records if r.stored and r.batch == 0}
    assert kept == {"grad_output", "grad_input"}
    full = tap.open(tmp_path / "full")
    assert len(recording.records) == len(full.records)
    given, expected = (
        next(r for r in run["1.1"].records if r.port == "grad_output") for run in (recording, full)
    )
    assert torch.equal(given.tensor(), expected.tensor())
    assert [(row.layer, row.verdict, row.origin) for row in live.comparison.layers] == [
        (row.layer, row.verdict, row.origin) for row in after.layers
    ]


def test_an_input_that_was_not_held_is_said_also_when_stopped(run: Run) -> None:
    x = torch.randn(1, 1 << 19)  # 2 MiB; a quarter of the budget is 256 KiB
    reference = run(nn.Sequential(nn.Identity(), nn.Identity()), x, layers="leaves")
    broken = nn.Sequential(nn.Identity(), nn.Identity())
    broken[1].register_forward_hook(lambda module, args, output: output * 1.5)
    options = {"layers": "leaves", "against": reference.path, "budget": 1 << 20}
    for stop in (True, False):
        rec = run(broken, x, stop=stop, **options)
        (note,) = [text for text in rec.notes if "too large to hold" in text]
        assert "could not be kept" in note


@pytest.mark.parametrize("name", ["against", "floor"])
def test_what_is_no_recording_is_refused(name: str, reference: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"against": reference.path, name: 3}
    with pytest.raises(tap.TapError, match=f"{name} must be a recording or its path, got 3"):
        tap.record(make_model(), tmp_path / "x", **options)
