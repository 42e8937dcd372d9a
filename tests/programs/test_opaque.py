"""Programs that can only be called, with a manifest and without; one model in several artefacts."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensortap as tap
from programs.heard import write
from support import Net
from tensortap.errors import OptionError, TargetError
from tensortap.taps.instrument.wrapper import instrument
from tensortap.taps.instrument.write import shares
from tensortap.taps.leaves import flatten
from tensortap.taps.programs.base import Argument, Options, Program
from tensortap.taps.programs.kinds import open_program
from tensortap.taps.programs.opaque.manifest import Entry, Manifest, OutputLeaf
from tensortap.taps.programs.opaque.output import rebuild
from tensortap.taps.programs.opaque.program import (
    KIND,
    OpaqueProgram,
    open_with_manifest,
    with_names,
)
from tensortap.taps.programs.opaque.split import SplitProgram


class Box:
    """Stands for a compiled model that nobody can look into."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self._call(*args, **kwargs)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.arange(12).view(2, 6)


@pytest.fixture(scope="module")
def eager(net: Net, ids: Tensor, tmp_path_factory: pytest.TempPathFactory) -> tap.Recording:
    path = tmp_path_factory.mktemp("eager") / "run"
    with tap.record(net, path, layers="all"):
        net(ids)
    return tap.open(path)


@pytest.fixture(scope="module")
def manifest_file(net: Net, ids: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wrapped = instrument(net, "all")
    wrapped(ids)
    return wrapped.manifest.save(tmp_path_factory.mktemp("manifest") / "model.taps.json")


def recorded(model: Any, path: Path, *args: Any, **options: Any) -> tap.Recording:
    with tap.record(model, path, **options) as rec:
        rec.run(*args)
    assert rec.failure is None
    return tap.open(path)


# Without a manifest.


def test_without_a_manifest_its_outputs_are_the_root(net, ids, eager, tmp_path) -> None:
    run = recorded(Box(net), tmp_path / "run", ids)
    assert list(run.layers) == [""]
    assert torch.equal(run[""].output, eager[""].output)
    result = tap.compare(eager, run)
    rows = {row.layer: row for row in result.layers}
    assert rows[""].verdict == "identical"
    assert {row.verdict for name, row in rows.items() if name} == {"missing"}
    assert bool(result)


def test_numpy_arrays_in_any_nesting_are_tensors(tmp_path) -> None:
    box = Box(lambda x: {"a": [np.float32([1, 2]), None], "b": np.arange(3)})
    run = recorded(box, tmp_path / "run", torch.ones(1))
    assert [(r.leaf, r.dtype) for r in run[""].records if r.shape is not None][:2] == [
        ("['a'][0]", "float32"),
        ("['b']", "int64"),
    ]


def test_it_is_a_program(net) -> None:
    program = KIND.program(Box(net), Options())
    assert isinstance(program, Program)
    assert [place.name for place in program.places] == [""]
    assert "was not instrumented" in program.absent
    assert program.describe()["class"].endswith("Box")
    assert not program.untapped
    assert not KIND.accepts(3)
    with pytest.raises(OptionError, match="something that can be called"):
        KIND.program(Path("model.neff"), Options())


# With one.


@pytest.mark.parametrize("form", ["nested", "flat", "dict", "numpy"])
def test_taps_are_found_however_the_artefact_returns_them(
    form: str, net, ids, eager, manifest_file, tmp_path
) -> None:
    wrapped = instrument(net, "all")

    def call(ids: Tensor) -> Any:
        output, taps = wrapped(ids)
        if form == "nested":
            return output, list(taps)
        flat = [output, *taps]
        if form == "dict":
            return {f"out_{index}": tensor for index, tensor in enumerate(flat)}
        return flat if form == "flat" else [tensor.numpy() for tensor in flat]

    run = recorded(Box(call), tmp_path / "run", ids, manifest=manifest_file, layers="all")
    result = tap.compare(eager, run)
    assert {row.verdict for row in result.layers} == {"identical"}
    assert len(result.layers) == len(eager.layers)
    assert run.layers == eager.layers
    assert {record.provenance for record in run.records} == {"hook"}
    assert any("was not checked" in note for note in run.notes)


def test_all_taps_and_the_output_are_what_is_recorded_by_default(
    net, ids, manifest_file, tmp_path
) -> None:
    run = recorded(Box(instrument(net, "all")), tmp_path / "run", ids, manifest=manifest_file)
    assert len(run.layers) == len(Manifest.load(manifest_file).layers) + 1
    few = recorded(
        Box(instrument(net, "all")),
        tmp_path / "few",
        ids,
        manifest=manifest_file,
        layers="blocks.*",
    )
    assert list(few.layers) == ["blocks.0", "blocks.1", "blocks.2"]


def test_an_artefact_that_was_not_made_with_the_manifest(net, ids, manifest_file) -> None:
    options = Options(manifest=manifest_file)
    cases = {
        "it returned 4 tensors, and the manifest has 1 of the model's own and 21 taps": instrument(
            net, "blocks"
        ),
        "it returned 1 tensors": net,
    }
    for sentence, model in cases.items():
        runner = KIND.program(Box(model), options).tapped(["blocks.0"], inputs=False, linears=[])
        with pytest.raises(TargetError) as caught:
            runner((ids,), {})
        assert sentence in str(caught.value)
        assert "was not made with this manifest" in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda t: t[0], r"returned float32 \(6, 16\), expected float32 of 3 dimensions"),
        (lambda t: t.long(), r"returned int64 \(2, 6, 16\), expected float32"),
    ],
)
def test_a_tap_of_another_rank_or_kind_is_refused(
    spoil: Any, sentence: str, net, ids, manifest_file
) -> None:
    wrapped = instrument(net, "all")

    def call(ids: Tensor) -> Any:
        output, taps = wrapped(ids)
        return output, (*taps[:3], spoil(taps[3]), *taps[4:])

    program = KIND.program(Box(call), Options(manifest=manifest_file))
    with pytest.raises(TargetError, match=sentence):
        program.plain((ids,), {})


@pytest.mark.parametrize("more", [1, 3])
def test_taps_in_another_order_are_refused_where_their_shapes_tell(
    more: int, net, ids, manifest_file
) -> None:
    wrapped = instrument(net, "all")
    order: list[int] = []

    def call(ids: Tensor) -> Any:
        output, taps = wrapped(ids)
        return output, tuple(taps[index] for index in order or range(len(taps)))

    program = KIND.program(Box(call), Options(manifest=manifest_file))
    given = (ids.repeat(more, 1),)  # another batch than the manifest was written with
    assert program.tapped(["blocks.0"], inputs=False, linears=[])(given, {}).calls
    shapes = [entry.shape for entry in Manifest.load(manifest_file).entries]
    first = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
    order[:] = [first, *range(1, first), 0, *range(first + 1, len(shapes))]
    with pytest.raises(TargetError, match="in another order than this manifest"):
        program.plain(given, {})


def test_a_narrower_number_is_still_the_same_tap(net, ids, manifest_file) -> None:
    wrapped = instrument(net, "all")

    def call(ids: Tensor) -> Any:
        output, taps = wrapped(ids)
        return output, [tap.half() for tap in taps]

    program = KIND.program(Box(call), Options(manifest=manifest_file))
    run = program.tapped(["head"], inputs=False, linears=[])((ids,), {})
    assert run.calls[0].outputs[0][1].dtype == torch.float16


# The model's own output, rebuilt.


@dataclasses.dataclass
class Result:
    loss: Any
    logits: Any
    more: Any = None


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1),
        (torch.ones(1), torch.zeros(2)),
        [torch.ones(1), None, torch.zeros(2)],
        {"a": torch.ones(1), "b": {"c]['": torch.zeros(2)}},
        {2: torch.ones(1), (1, "x"): torch.zeros(2)},
        Result(None, torch.ones(1), (torch.zeros(2), Result(torch.ones(3), None))),
        (3, torch.ones(1), "text", torch.zeros(2)),
        None,
    ],
)
def test_a_rebuilt_output_has_the_same_leaves(value: Any) -> None:
    pairs = flatten(value)
    leaves = [OutputLeaf(leaf, tensor is not None) for leaf, tensor in pairs]
    made = rebuild(leaves, [tensor for _, tensor in pairs if tensor is not None])
    again = flatten(made)
    assert [leaf for leaf, _ in again] == [leaf for leaf, _ in pairs]
    assert all(left is right for (_, left), (_, right) in zip(pairs, again, strict=True))


def test_leaves_of_an_untrusted_manifest_do_no_harm() -> None:
    odd = ["[999999999]", ".class", ".__import__('os')", "[[1]]", "no leaf", "[0"]
    made = rebuild([OutputLeaf(leaf) for leaf in odd], [torch.ones(1)] * len(odd))
    assert len(flatten(made)) == len(odd)


# Files.


def test_a_file_goes_through_its_manifest(net, ids, eager, tmp_path) -> None:
    written = write(net, (ids,), {}, tmp_path / "model.pt", layers="all")
    run = recorded(written.files[0], tmp_path / "run", ids, manifest=written.manifest_file)
    result = tap.compare(eager, run)
    assert {row.verdict for row in result.layers} == {"identical"}
    assert recorded(written.manifest_file, tmp_path / "two", ids).layers == run.layers


def test_another_file_than_the_one_that_was_written_is_refused(net, ids, tmp_path) -> None:
    first = write(net, (ids,), {}, tmp_path / "a.pt", layers="blocks")
    other = write(net, (ids,), {}, tmp_path / "b.pt", layers="type:Dropout")
    assert len(first.manifest.entries) == len(other.manifest.entries)
    with pytest.raises(TargetError, match="it is another file than the one that was written"):
        open_with_manifest(other.files[0], first.manifest_file, Options())
    first.files[0].rename(tmp_path / "moved.pt")  # a file may go by another name
    assert open_program(tmp_path / "moved.pt", Options(manifest=first.manifest_file)).places
    with pytest.raises(TargetError, match=r"a\.pt', which the manifest .* names, does not exist"):
        open_program(first.manifest_file)


def test_a_twin_without_taps_is_what_the_self_check_runs(net, ids, tmp_path) -> None:
    written = write(net, (ids,), {}, tmp_path / "model.pt", layers="all")
    torch.jit.trace(net, (ids,)).save(str(tmp_path / "plain.pt"))
    replace(written.manifest, plain="plain.pt").save(written.manifest_file)
    good = recorded(written.manifest_file, tmp_path / "good", ids)
    assert [(c["check"], c["passed"]) for c in good.manifest.self_checks] == [("output", True)]
    assert not any("was not checked" in note for note in good.notes)
    worse = Net().eval().requires_grad_(False)
    torch.jit.trace(worse, (ids,)).save(str(tmp_path / "plain.pt"))
    bad = recorded(written.manifest_file, tmp_path / "bad", ids)
    assert [(c["check"], c["passed"]) for c in bad.manifest.self_checks] == [("output", False)]
    (tmp_path / "plain.pt").unlink()  # it need not travel with the other
    left = recorded(written.manifest_file, tmp_path / "left", ids)
    assert any("was not checked" in note for note in left.notes)


# One model in several artefacts.


def test_three_parts_are_recorded_as_one(net, ids, eager, tmp_path) -> None:
    written = write(net, (ids,), {}, tmp_path / "model.pt", layers="all", split=3)
    assert [file.name for file in written.files] == ["model.0.pt", "model.1.pt", "model.2.pt"]
    program = open_program(written.manifest_file)
    assert isinstance(program, SplitProgram)
    held = [[place.name for place in part.places if place.name] for part in program.parts]
    assert [name for part in held for name in part] == list(written.manifest.layers)
    assert all(held)
    run = recorded(written.manifest_file, tmp_path / "run", ids)
    assert run.layers == eager.layers
    result = tap.compare(eager, run)
    assert {row.verdict for row in result.layers} == {"identical"}
    assert [(c["check"], c["passed"]) for c in run.manifest.self_checks] == [("parts", True)] * 2
    part = recorded(written.files[1], tmp_path / "part", ids, manifest=written.manifest_file)
    assert part.layers == run.layers


class Loop(nn.Module):
    """Calls of two layers in turns: a part's taps are not a stretch of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.b(self.a(x))
        return x


def test_parts_whose_layers_take_turns_keep_the_order(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Loop().eval(), torch.randn(2, 4)
    written = write(model, (x,), {}, tmp_path / "model.pt", layers="all", split=2)
    run = open_program(written.manifest_file).tapped(["a", "b"], inputs=False, linears=[])((x,), {})
    assert [call.layer for call in run.calls] == ["a", "b"] * 3
    for call, expected in zip(run.calls, written.reference, strict=True):
        assert torch.equal(call.outputs[0][1], expected)


def test_parts_that_are_not_one_model_are_found_out(net, ids, tmp_path) -> None:
    written = write(net, (ids,), {}, tmp_path / "model.pt", split=2)
    other = Net().eval().requires_grad_(False)
    strange = write(other, (ids,), {}, tmp_path / "other.pt", split=2)
    written.files[1].write_bytes(strange.files[1].read_bytes())
    with pytest.raises(TargetError, match="another file"):
        open_program(written.manifest_file)
    parts = (written.manifest.parts[0], replace(strange.manifest.parts[1], file="model.1.pt"))
    replace(written.manifest, parts=parts).save(written.manifest_file)
    run = recorded(written.manifest_file, tmp_path / "run", ids)
    (check,) = run.manifest.self_checks
    assert check["check"] == "parts" and not check["passed"]
    assert "are not parts of one model" in check["text"]
    assert [finding.severity for finding in run.check()].count("error") == 1
    with pytest.raises(TargetError, match="is none of the 2 artefacts"):
        open_with_manifest(strange.files[0], written.manifest_file, Options())
    with pytest.raises(OptionError, match="is of 2 artefacts, and one object was given"):
        KIND.program(Box(net), Options(manifest=written.manifest_file))


def test_a_manifest_alone_names_no_artefact(manifest_file) -> None:
    with pytest.raises(TargetError, match="does not say which artefact it belongs to"):
        open_program(manifest_file)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_shares_are_whole_in_order_and_about_equal(count: int) -> None:
    names = [f"l{index}" for index in range(8)]
    entries = tuple(Entry(name, "L", "", 0, (1,), "float32") for name in names)
    manifest = Manifest("m", entries, ())
    groups = shares(manifest, [10] * 8, count)
    assert [name for group in groups for name in group] == names
    assert len(groups) == count
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    uneven = shares(manifest, [1, 1, 1, 1, 1, 1, 1, 100], count)
    assert [name for group in uneven for name in group] == names
    assert len(uneven) == count
    with pytest.raises(OptionError, match="from 1 to 8"):
        shares(manifest, [10] * 8, 9)


def test_a_live_program_that_cannot_be_called_is_run_by_its_runtime(
    net, ids, manifest_file, eager, tmp_path
) -> None:
    program = torch.export.export(instrument(net, "all"), (ids,), strict=False)
    run = recorded(program, tmp_path / "run", ids, manifest=manifest_file)
    assert {row.verdict for row in tap.compare(eager, run).layers} == {"identical"}
    assert isinstance(KIND.program(program, Options(manifest=manifest_file)), OpaqueProgram)


def test_positions_have_the_names_of_the_manifest() -> None:
    """A package of AOTInductor has lost them, and the manifest has not."""
    given: list[Any] = []

    def call(args: Any, kwargs: Any) -> Any:
        given.append((args, dict(kwargs)))

    declared = [Argument("0"), Argument("1.a"), Argument("1.b")]
    by_name, named = with_names(call, declared, ("x", "past"))
    assert [argument.name for argument in named or ()] == ["x", "past.a", "past.b"]
    by_name((), {"x": 1, "past.a": 2, "1.b": 3})
    assert given == [((), {"0": 1, "1.a": 2, "1.b": 3})]
    for names in ((), ("x",), ("x", "past", "labels")):  # which is which cannot be told
        assert with_names(call, declared, names) == (call, declared)
    assert with_names(call, [Argument("x")], ("x",))[0] is call
    assert with_names(call, None, ("x",)) == (call, None)
