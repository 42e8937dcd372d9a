"""Recordings of compiled models beside eager ones: names, loose leaves, reasons, self-checks.

The compiled side is written as a program's tap writes it, so that every case can be had alone;
below, real programs are recorded from end to end.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tensortap as tap
from programs.models import MODELS
from schemas import validate
from tensortap.cli.main import app
from tensortap.comparing.loose import is_loose
from tensortap.errors import ComparisonError
from tensortap.recording.dtypes import dtype_name
from tensortap.recording.health import check
from tensortap.recording.schema import Manifest, Site
from tensortap.recording.writer import Writer

Items = Iterable[tuple[Any, ...]]  # layer, leaf, tensor, and what else a Site takes
Write = Callable[..., Path]
ABSENT = (
    "The graph holds no value with this layer's name: it was folded, fused, or nothing reads it."
)

torch.manual_seed(0)
OUT, K, V = torch.randn(2, 5, 12), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A recording as a tap would write it: [(layer, leaf, tensor)] with a provenance."""
    count = 0

    def make(
        items: Items,
        provenance: str = "hook",
        *,
        port: str = "output",
        layers: Sequence[str] = ("all",),
        **manifest: Any,
    ) -> Path:
        nonlocal count
        count += 1
        path = tmp_path / f"run{count}"
        target = manifest.pop("target", {})
        if provenance != "hook":
            target = {"runtime": "torchscript", "absent": ABSENT, **target}
        selection = {"layers": list(layers)}
        writer = Writer(str(path), Manifest(target=target, selection=selection, **manifest))
        calls: dict[tuple[str, str, str], int] = {}
        for order, (layer, leaf, tensor, *more) in enumerate(items):
            known = dict(more[0]) if more else {}
            where = (layer, leaf, known.get("port", port))
            call = known.pop("call", calls.get(where, 0))
            calls[where] = call + 1
            site = Site(
                layer,
                known.pop("port", port),
                leaf,
                None,
                known.pop("type", "Linear"),
                tuple(tensor.shape),
                dtype_name(tensor.dtype),
                provenance=known.pop("provenance", provenance),
            )
            writer.line(writer.site(site), (order, 0, 0, call), writer.take(tensor))
        writer.close()
        return path

    return make


def off(tensor: torch.Tensor, by: float = 0.5) -> torch.Tensor:
    """The same tensor with an error that nobody could overlook."""
    return tensor + by * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))


def parts(row: Any) -> dict[str, tuple[str, str]]:
    return {part.leaf: (part.verdict, part.why) for part in row.parts}


# --- loose leaves ----------------------------------------------------------------------------


def test_what_is_loose(write: Write) -> None:
    run = tap.open(write([("a", "", OUT), ("b", "?1", K), ("c", "[0]", K)], "scope"))
    assert [is_loose(run[name].records) for name in "abc"] == [True, True, False]
    assert not is_loose(tap.open(write([("a", "", OUT)]))["a"].records)


def test_the_output_among_keys_and_values_on_their_way_to_a_cache(write: Write) -> None:
    eager = write([("attn", "[0]", OUT)])
    compiled = write([("attn", "?0", K), ("attn", "?1", OUT), ("attn", "?2", V)], "scope")
    row = tap.compare(eager, compiled)["attn"]
    assert row.verdict == "identical" and len(row.parts) == 1
    row = tap.compare(compiled, eager)["attn"]  # and when the artefact is the reference
    assert row.verdict == "identical" and [part.leaf for part in row.parts] == ["?1"]


def test_a_value_that_diverged_is_still_the_only_one_of_its_shape(write: Write) -> None:
    eager = write([("attn", "[0]", OUT)])
    compiled = write([("attn", "?0", off(OUT)), ("attn", "?1", K), ("attn", "?2", V)], "scope")
    assert tap.compare(eager, compiled)["attn"].verdict == "diverged"


def test_values_decide_between_two_of_one_shape(write: Write) -> None:
    eager = write([("attn", "[0]", OUT), ("attn", "[1]", K), ("attn", "[2]", V)])
    compiled = write([("attn", "?0", OUT), ("attn", "?1", V), ("attn", "?2", K)], "scope")
    row = tap.compare(eager, compiled)["attn"]
    assert {leaf: verdict for leaf, (verdict, _) in parts(row).items()} == dict.fromkeys(
        ("[0]", "[1]", "[2]"), "identical"
    )


def test_nothing_is_taken_where_nothing_decides(write: Write) -> None:
    eager = write([("first", "", OUT), ("attn", "", OUT)])
    rivals = [("attn", "?0", off(OUT, 2)), ("attn", "?1", off(OUT.flip(0), 2))]
    compiled = write([("first", "", OUT), *rivals], "scope")
    for one, other, side in ((eager, compiled, "candidate"), (compiled, eager, "reference")):
        result = tap.compare(one, other)
        row = result["attn"]
        assert row.verdict == "missing" and result.same
        assert row.why == (
            f"the {side} has no output: 2 values of this shape leave the layer, and the compiled "
            "model does not say which is its output"
        )
        assert row.note == row.why


def test_what_values_decided_is_believed_where_they_have_diverged(write: Write) -> None:
    x, y = torch.randn(2, 2, 5, 12)
    block = {"type": "Block"}
    eager = write([("b.0", "", x, {**block}), ("b.1", "", y, {**block})])
    residual = torch.randn(2, 2, 5, 12)
    compiled = write(
        [
            ("b.0", "?0", residual[0], {**block}),
            ("b.0", "?1", x, {**block}),
            ("b.1", "?0", residual[1], {**block}),
            ("b.1", "?1", off(y, 2), {**block}),
        ],
        "scope",
    )
    result = tap.compare(eager, compiled)
    assert [row.verdict for row in result.layers] == ["identical", "diverged"]
    part = result["b.1"].main
    assert part is not None and part.difference is not None
    torch.testing.assert_close(part.difference.max_abs, float((off(y, 2) - y).abs().max()))


def test_of_two_that_are_left_the_last_pair_is_clear(write: Write) -> None:
    eager = write([("attn", "[0]", K), ("attn", "[1]", V)])
    compiled = write([("attn", "?0", off(V)), ("attn", "?1", K)], "scope")
    found = parts(tap.compare(eager, compiled)["attn"])
    assert (found["[0]"][0], found["[1]"][0]) == ("identical", "diverged")


def test_one_value_may_be_two_leaves(write: Write) -> None:
    """A model that returns its last hidden state twice has one value for both."""
    eager = write([("enc", ".last", OUT), ("enc", ".states[0]", OUT)])
    compiled = write([("enc", "", OUT)], "scope")
    row = tap.compare(eager, compiled)["enc"]
    assert [part.verdict for part in row.parts] == ["identical"] * 2


def test_a_leaf_that_the_compiler_dropped(write: Write) -> None:
    eager = write([("attn", "[0]", OUT), ("attn", "[1]", K), ("attn", "[2]", V)])
    compiled = write([("attn", "", OUT)], "scope")
    why = "nothing reads it, so the compiler dropped it"
    for one, other, side in ((eager, compiled, "candidate"), (compiled, eager, "reference")):
        result = tap.compare(one, other)
        row = result["attn"]
        assert row.verdict == "identical" and result.same
        found = parts(row)
        assert found["[1]"][0] == found["[2]"][0] == "missing"
        assert found["[1]"][1].startswith(f"the {side} has no output [1]: the compiled model kept")
        assert row.note.startswith(f"the {side} has no output [1], output [2]: ")
        assert row.note.endswith(why) and row.note.count(why) == 1


def test_a_value_of_another_shape_is_another_value(write: Write) -> None:
    eager = write([("a", "", OUT), ("router", "[0]", torch.randn(10, 4))])
    compiled = write([("a", "", OUT), ("router", "", torch.randn(10, 12))], "scope")
    row = tap.compare(eager, compiled)["router"]
    assert row.verdict == "missing"
    assert "is float32 [10, 12], not float32 [10, 4]: it is another" in row.why


def test_numbers_and_indices_are_not_each_other(write: Write) -> None:
    chosen = torch.randint(0, 9, (2, 5, 12))
    eager = write([("a", "", OUT), ("route", "[0]", OUT), ("route", "[1]", chosen)])
    compiled = write(
        [("a", "", OUT), ("route", "?0", chosen.int()), ("route", "?1", OUT.bfloat16())], "scope"
    )
    found = parts(tap.compare(eager, compiled)["route"])
    assert found["[0]"][0] == "within" and found["[1]"][0] in ("identical", "within")
    lone = write([("a", "", OUT), ("route", "", chosen)], "scope")
    assert parts(tap.compare(eager, lone)["route"])["[0]"][0] == "missing"


def test_leading_axes_that_a_graph_flattened(write: Write) -> None:
    eager = write([("fc", "", OUT), ("attn", "[0]", OUT)])
    flat = OUT.reshape(10, 12)
    compiled = write([("fc", "", flat), ("attn", "?0", K), ("attn", "?1", flat)], "scope")
    result = tap.compare(eager, compiled)
    assert [row.verdict for row in result.layers] == ["identical", "identical"]
    assert "flatten" in result["attn"].transform


def test_calls_that_leave_other_values_behind(write: Write) -> None:
    """A shared layer: after one call its key is read too, after the other it is not."""
    first, second = torch.randn(2, 2, 5, 12)
    eager = write([("s", "", first), ("s", "", second)])
    compiled = write(
        [("s", "", first), ("s", "?0", K, {"call": 1}), ("s", "?1", second, {"call": 1})], "scope"
    )
    row = tap.compare(eager, compiled)["s"]
    assert row.verdict == "identical" and row.parts[0].moments == 2 and len(row.parts) == 1


def test_two_programs_of_one_kind_have_the_same_names_for_their_values(write: Write) -> None:
    items = [("attn", "?0", OUT), ("attn", "?1", K), ("attn", "?2", V)]
    again = [("attn", "?0", OUT), ("attn", "?1", K), ("attn", "?2", off(V))]
    row = tap.compare(write(items, "scope"), write(again, "scope"))["attn"]
    assert [part.verdict for part in row.parts] == ["identical", "identical", "diverged"]


def test_two_programs_of_two_kinds(write: Write) -> None:
    ours = write([("attn", "?0", OUT), ("attn", "?1", K)], "scope")
    theirs = write([("attn", "?0", K), ("attn", "?1", OUT)], "scope", target={"runtime": "onnx"})
    row = tap.compare(ours, theirs)["attn"]
    assert [part.verdict for part in row.parts] == ["identical", "identical"]
    lone = write([("attn", "", OUT)], "scope", target={"runtime": "onnx"})
    row = tap.compare(ours, lone)["attn"]
    assert [part.verdict for part in row.parts] == ["identical"]


def test_inputs_pair_as_outputs_do(write: Write) -> None:
    cos, sin = torch.randn(5, 4).cos(), torch.randn(5, 4).sin()
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    names = ("['hidden_states']", "['cos']", "['sin']", "['mask']")
    inputs = [
        ("attn", leaf, tensor, {"port": "input"})
        for leaf, tensor in zip(names, (OUT, cos, sin, mask), strict=True)
    ]
    eager = write([*inputs, ("attn", "[0]", OUT)])
    read = [("attn", f"?{i}", t, {"port": "input"}) for i, t in enumerate((sin, OUT, cos))]
    compiled = write([*read, ("attn", "", OUT)], "scope")
    row = tap.compare(eager, compiled)["attn"]
    assert row.input_verdict == "identical"
    given = {part.leaf: part for part in row.parts if part.port == "input"}
    assert [given[name].verdict for name in names] == ["identical"] * 3 + ["missing"]
    assert "no value that the compiled layer reads is this one" in given["['mask']"].why
    # One side without inputs is one line, whatever its values are called.
    row = tap.compare(write([("attn", "[0]", OUT)]), compiled)["attn"]
    assert [part.why for part in row.parts if part.port == "input"] == [
        "the reference has no input ?0"
    ]


def test_a_layer_that_took_in_another_reads_that_ones_input(write: Write) -> None:
    """A convolution that was folded into the batch norm behind it: same shapes, another value."""
    x, y, z = torch.randn(3, 2, 5, 12)

    def given(layer: str, leaf: str, tensor: torch.Tensor, kind: str = "Norm") -> tuple[Any, ...]:
        return (layer, leaf, tensor, {"port": "input", "type": kind})

    eager = write([given("fc", "", x, "Linear"), ("fc", "", y), given("bn", "", y), ("bn", "", z)])
    folded = write([given("fc", "", x, "Linear"), ("fc", "", y), given("bn", "", x), ("bn", "", z)])
    assert tap.compare(eager, folded)["bn"].input_verdict == "diverged"  # a module says what it got
    folded = write([given("bn", "", x), ("bn", "", z)], "scope")
    row = tap.compare(eager, folded)["bn"]
    assert (row.verdict, row.input_verdict) == ("identical", "missing")
    assert "holds something else" in row.note


def test_inputs_that_diverged_are_believed_where_earlier_ones_agreed(write: Write) -> None:
    values = torch.randn(4, 2, 5, 12)

    def items(*tensors: torch.Tensor) -> list[tuple[Any, ...]]:
        pairs = itertools.pairwise(tensors)
        return [
            item
            for n, (given, made) in enumerate(pairs)
            for item in ((f"l.{n}", "", given, {"port": "input"}), (f"l.{n}", "", made))
        ]

    eager = write(items(*values))
    wrong = [values[0], values[1], off(values[2], 2), off(values[3], 2)]
    compiled = write(items(*wrong), "scope")
    result = tap.compare(eager, compiled)
    assert [(row.verdict, row.origin) for row in result.layers] == [
        ("identical", None),
        ("diverged", "made here"),
        ("diverged", "inherited"),
    ]


def test_who_made_it_tells_what_a_layer_reads_where_values_have_parted(write: Write) -> None:
    """Two norms behind linears: one reads the linear before it, the other took it in."""
    x, a, b, c, d = torch.randn(5, 2, 5, 12)
    norm = {"type": "Norm"}
    given = {"port": "input", **norm}
    eager = write(
        [
            ("pre", "", x),
            ("l.0", "", a),
            ("n.0", "", a, given),
            ("n.0", "", b, norm),
            ("l.1", "", c),
            ("n.1", "", c, given),
            ("n.1", "", d, norm),
        ]
    )
    wrong, norm_wrong, last = off(a, 2), off(b, 2), off(d, 2)
    compiled = write(
        [
            ("pre", "", x),
            ("l.0", "", wrong),
            ("n.0", "", wrong, given),
            ("n.0", "", norm_wrong, norm),
            ("n.1", "", norm_wrong, given),
            ("n.1", "", last, norm),
        ],
        "scope",
    )
    result = tap.compare(eager, compiled)
    assert (result["n.0"].input_verdict, result["n.0"].origin) == ("diverged", "inherited")
    assert (result["n.1"].input_verdict, result["n.1"].origin) == ("missing", "unknown")


def test_summaries_pair_by_shape_too(tmp_path: Path) -> None:
    def summaries(name: str, items: Items, provenance: str) -> Path:
        writer = Writer(str(tmp_path / name), Manifest(target={"runtime": provenance}))
        for order, (leaf, tensor) in enumerate(items):
            shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
            known: Any = "scope" if provenance == "onnx" else "hook"
            site = Site("a", "output", leaf, None, "", shape, dtype, "cpu", known)
            writer.summarize(writer.site(site), (order, 0, 0, 0), tensor)
        writer.close()
        return tmp_path / name

    eager = summaries("eager", [("[0]", OUT), ("[1]", K), ("[2]", V)], "eager")
    compiled = summaries("onnx", [("?0", V), ("?1", K), ("?2", OUT)], "onnx")
    row = tap.compare(eager, compiled)["a"]
    assert [part.verdict for part in row.parts] == ["within"] * 3
    lone = summaries("lone", [("?0", off(OUT, 2)), ("?1", off(OUT.flip(0), 2))], "onnx")
    with pytest.raises(ComparisonError, match="does not say which is its output"):
        tap.compare(eager, lone)


# --- missing, with a reason ------------------------------------------------------------------


def test_a_missing_layer_has_the_reason_that_its_run_gives(write: Write) -> None:
    eager = write([("a", "", OUT), ("drop", "", OUT), ("head", "", K)])
    skipped = [
        {
            "layer": "drop",
            "port": "output",
            "leaf": "",
            "reason": "it passes its input on and makes no value of its own",
            "count": 1,
        }
    ]
    compiled = write([("a", "", OUT)], "scope", skipped=skipped)
    for one, other, side in ((eager, compiled, "candidate"), (compiled, eager, "reference")):
        result = tap.compare(one, other)
        assert result.same and result.counts == {"identical": 1, "missing": 2}
        assert result["drop"].note == (
            f"missing in the {side}: it passes its input on and makes no value of its own"
        )
        assert result["head"].note == f"missing in the {side}: {ABSENT.rstrip('.')}"


def test_a_none_in_a_layer_is_no_reason_for_its_namesake(write: Write) -> None:
    none = {"port": "output", "leaf": "[1]", "reason": "None stands where a tensor could"}
    eager = write([("a", "", OUT), ("b", "[0]", K)], skipped=[{"layer": "b", **none, "count": 1}])
    compiled = write([("a", "", OUT), ("b", "", K), ("module.b", "", LOGITS)], "scope")
    assert tap.compare(eager, compiled)["module.b"].note == "missing in the reference"


def test_what_was_not_asked_for_is_no_fault_of_the_compiler(write: Write) -> None:
    eager = write([("a", "", OUT), ("head", "", K)])
    compiled = write([("a", "", OUT)], "scope", layers=["a"])
    assert tap.compare(eager, compiled)["head"].note == "missing in the candidate"


def test_reasons_are_found_behind_a_prefix(write: Write) -> None:
    names = [f"model.layers.{i}.{part}" for i in range(3) for part in ("attn", "mlp")]
    values = torch.randn(len(names), 2, 4)
    eager = write(
        [*((n, "", v) for n, v in zip(names, values, strict=True)), ("model.drop", "", K)]
    )
    reason = "its name would be a guess; --accept-inferred records it"
    item = {"port": "output", "leaf": "", "reason": reason, "count": 1}
    compiled = write(
        [(f"models.0.model.{n}", "", v) for n, v in zip(names, values, strict=True)],
        "scope",
        skipped=[{"layer": "models.0.model.model.drop", **item}],
    )
    for one, other, side in ((eager, compiled, "candidate"), (compiled, eager, "reference")):
        result = tap.compare(one, other)
        assert result.counts == {"identical": 6, "missing": 1}
        (row,) = (row for row in result.layers if row.verdict == "missing")
        assert row.note == f"missing in the {side}: {reason}"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_layers_of_seed_001_pair_without_a_map(write: Write, count: int) -> None:
    values = torch.randn(count, 2, 4)
    kind = {"type": "LlamaDecoderLayer"}
    eager = write([(f"model.layers.{i}", "", v, {**kind}) for i, v in enumerate(values)])
    compiled = write(
        [(f"models.0.model.model.layers.{i}", "", off(v), {**kind}) for i, v in enumerate(values)],
        "scope",
    )
    result = tap.compare(eager, compiled)
    assert [row.candidate_layer for row in result.layers] == [
        f"models.0.model.model.layers.{i}" for i in range(count)
    ]
    assert {row.matched_by for row in result.layers} == {"normalised"}


def test_a_leaf_that_was_none_says_so(write: Write) -> None:
    item = {
        "layer": "attn",
        "port": "output",
        "leaf": "[1]",
        "reason": "None stands where a tensor could",
    }
    eager = write([("attn", "[0]", OUT), ("attn", "[1]", K)])
    other = write([("attn", "[0]", OUT)], skipped=[{**item, "count": 1}])
    found = parts(tap.compare(eager, other)["attn"])
    assert found["[1]"] == (
        "missing",
        "the candidate has no output [1]: None stands where a tensor could",
    )


# --- roots -----------------------------------------------------------------------------------

LOGITS, STATE = torch.randn(2, 5, 9), torch.randn(2, 3)


@pytest.mark.parametrize("leaf", ["", "[0]", "['logits']", "['output_7']"])
def test_root_pairs_with_root_whatever_the_outputs_are_called(write: Write, leaf: str) -> None:
    kind = {"type": "LlamaForCausalLM"}
    eager = write([("lm_head", "", LOGITS), ("", ".logits", LOGITS, kind)])
    for values, verdict in ((LOGITS, "identical"), (off(LOGITS), "diverged")):
        opaque = write(
            [("", leaf, values, {"type": ""})], target={"runtime": "opaque", "absent": ABSENT}
        )
        for one, other in ((eager, opaque), (opaque, eager)):
            result = tap.compare(one, other)
            row = result[""]
            assert (row.layer, row.candidate_layer, row.verdict) == ("", "", verdict)
            assert result["lm_head"].verdict == "missing"


def test_outputs_of_a_root_pair_by_name_then_by_shape(write: Write) -> None:
    twin = torch.randn(2, 5, 9)
    eager = write([("", ".logits", LOGITS), ("", ".aux", twin), ("", ".state", STATE)])
    opaque = write(
        [("", "['aux']", off(twin)), ("", "['logits']", off(LOGITS)), ("", "['out']", STATE)],
        target={"runtime": "onnx"},
    )
    row = tap.compare(eager, opaque)[""]
    found = {part.leaf: part for part in row.parts}
    assert found[".state"].verdict == "identical"
    for leaf, tensor in ((".logits", LOGITS), (".aux", twin)):
        difference = found[leaf].difference
        assert difference is not None
        expected = float((off(tensor) - tensor).abs().max())
        torch.testing.assert_close(difference.max_abs, expected)


def test_blocks_beside_outputs_alone_is_a_sentence(write: Write) -> None:
    eager = write([("blocks.0", "", OUT), ("blocks.1", "", OUT.flip(0))], layers=["blocks"])
    opaque = write([("", "", LOGITS, {"type": ""})], target={"runtime": "opaque"})
    for one, other in ((eager, opaque), (opaque, eager)):
        with pytest.raises(ComparisonError, match="--layers blocks --layers ''") as raised:
            tap.compare(one, other)
        assert "the model's own outputs alone" in str(raised.value)
    done = CliRunner().invoke(app, ["compare", str(eager), str(opaque)])
    assert done.exit_code == 2


# --- how names are known ---------------------------------------------------------------------


def mixed(write: Write) -> tuple[Path, Path]:
    eager = write([("a", "", OUT), ("b", "", K), ("c", "", V)])
    compiled = write(
        [
            ("a", "", OUT, {"provenance": "scope"}),
            ("b", "", off(K), {"provenance": "inferred"}),
        ],
        "scope",
    )
    return eager, compiled


def test_every_row_knows_how_both_names_are_known(write: Write) -> None:
    result = tap.compare(*mixed(write))
    assert [(r.provenance, r.candidate_provenance) for r in result.layers] == [
        ("hook", "scope"),
        ("hook", "inferred"),
        ("hook", None),
    ]
    assert [row.guessed for row in result.layers] == [False, True, False]
    data = json.loads(result.to_json())
    validate(data, "comparison")
    assert [(r["provenance"], r["candidate_provenance"]) for r in data["layers"]] == [
        ("hook", "scope"),
        ("hook", "inferred"),
        ("hook", None),
    ]
    assert any("known by a guess (b)" in warning for warning in result.warnings)


def test_a_guess_is_called_one_wherever_it_is_shown(write: Write) -> None:
    eager, compiled = mixed(write)
    result = tap.compare(eager, compiled)
    text = str(result)
    assert "name by" in text and "hook / inferred: a guess" in text and "hook / scope" in text
    page = result.to_html()
    assert "hook / inferred: a guess" in page
    assert "the name is a guess, from the shape of the graph (inferred)" in page
    done = CliRunner().invoke(app, ["compare", str(eager), str(compiled), "b"])
    assert "is a guess, from the shape of the graph" in " ".join(done.output.split())
    assert "name by" not in str(tap.compare(eager, eager))


def test_show_has_the_provenance(write: Write) -> None:
    eager, compiled = mixed(write)
    run = CliRunner()
    data = json.loads(run.invoke(app, ["show", str(compiled), "--json"]).stdout)
    assert [row["provenance"] for row in data["layers"]] == ["scope", "inferred"]
    data = json.loads(run.invoke(app, ["show", str(eager), "--json"]).stdout)
    assert [row["provenance"] for row in data["layers"]] == ["hook"] * 3
    assert "name by" not in run.invoke(app, ["show", str(eager)]).output
    table = run.invoke(app, ["show", str(compiled)]).output
    assert "name by" in table and "inferred: a guess" in table and "torchscript" in table
    one = run.invoke(app, ["show", str(compiled), "a"]).output
    assert "Its name was written on the graph by its compiler (scope)." in one
    one = json.loads(run.invoke(app, ["show", str(compiled), "b", "--json"]).stdout)
    assert one["provenance"] == one["layers"][0]["provenance"] == "inferred"


def test_the_runtime_is_among_what_differs(write: Write) -> None:
    eager, compiled = mixed(write)
    found = {d.name: (d.reference, d.candidate) for d in tap.compare(eager, compiled).environment}
    assert found["runtime"] == ("eager", "torchscript")
    assert not any("absent" in name for name in found)
    same = tap.compare(compiled, compiled)
    assert dict(same.in_common)["runtime"] == "torchscript"
    assert "runtime" not in dict(tap.compare(eager, eager).in_common)


# --- self-checks -----------------------------------------------------------------------------

GOOD = {
    "layer": "",
    "check": "output",
    "passed": True,
    "text": "same",
    "largest": 0.0,
    "allowed": 0.0,
}
LINEAR = {
    "layer": "a",
    "check": "linear",
    "passed": True,
    "text": "agrees",
    "largest": 1e-7,
    "allowed": 1e-5,
}
BAD = {
    **LINEAR,
    "layer": "b",
    "passed": False,
    "text": "The output of 'b' is not its input times its weight: up to 0.5 off.",
}


def test_a_self_check_that_failed_is_a_finding(write: Write) -> None:
    path = write([("a", "", OUT), ("b", "", K)], "scope", self_checks=[GOOD, LINEAR, BAD, BAD])
    (finding,) = check(path)
    assert (finding.layer, finding.kind, finding.severity) == ("b", "self-check", "error")
    assert finding.text == (
        "The output of 'b' is not its input times its weight: up to 0.5 off; the same 1 more times."
    )
    run = CliRunner()
    done = run.invoke(app, ["check", str(path)])
    assert done.exit_code == 1 and "self-check" in done.output
    data = json.loads(run.invoke(app, ["check", str(path), "--json"]).stdout)
    assert [(f["layer"], f["kind"]) for f in data["findings"]] == [("b", "self-check")]
    assert "self-check FAILED: 2 of 4 checks" in run.invoke(app, ["show", str(path)]).output
    warnings = tap.compare(path, path).warnings
    assert sum("The self-check of" in warning for warning in warnings) == 2


def test_self_checks_that_passed_are_one_line(write: Write) -> None:
    more = [{**LINEAR, "layer": name} for name in "bcd"]
    path = write([("a", "", OUT)], "scope", self_checks=[GOOD, LINEAR, *more])
    assert check(path) == []
    out = CliRunner().invoke(app, ["show", str(path)]).output
    assert "self-check: output identical with and without taps; 4 linears agree" in out
    data = json.loads(CliRunner().invoke(app, ["show", str(path), "--json"]).stdout)
    assert len(data["self_checks"]) == 5
    off_by = write([("a", "", OUT)], "scope", self_checks=[{**GOOD, "largest": 2e-6}])
    assert "output at most 2e-06 off with" in CliRunner().invoke(app, ["show", str(off_by)]).output
    manifest = json.loads((path / "recording.json").read_text())
    validate(manifest, "recording")


def test_what_a_compiled_model_cannot_say_is_no_difference(write: Write) -> None:
    said = {"class": "models.Net", "training": False, "config": {"width": 3}, "parameters": 7}
    eager = write([("a", "", OUT)], target=said)
    compiled = write([("a", "", OUT)], "scope", target={"class": "Net", "parameters": 8})
    found = {d.name: (d.reference, d.candidate) for d in tap.compare(eager, compiled).environment}
    assert found == {"runtime": ("eager", "torchscript"), "target.parameters": ("7", "8")}


# --- from end to end -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model, recorded as it is and in four compiled forms, read from their files."""
    folder = tmp_path_factory.mktemp("awkward")
    model, args, kwargs = MODELS["awkward"]()
    torch.jit.trace(model, args, strict=False, check_trace=False).save(folder / "traced.pt")
    torch.jit.script(model).save(folder / "scripted.pt")
    torch.export.save(torch.export.export(model, args, strict=False), folder / "exported.pt2")
    programs: dict[str, Any] = {
        "eager": model,
        "traced": torch.jit.load(folder / "traced.pt"),
        "scripted": torch.jit.load(folder / "scripted.pt"),
        "exported": torch.export.load(folder / "exported.pt2"),
    }
    for name, program in programs.items():
        with torch.no_grad(), tap.record(program, folder / name, layers="all", inputs=True) as rec:
            rec.run(*args, **kwargs)
    return {name: folder / name for name in programs}


@pytest.mark.parametrize("form", ["traced", "scripted", "exported"])
def test_every_value_that_a_program_still_holds_is_the_modules(
    awkward: dict[str, Path], form: str
) -> None:
    for one, other in ((awkward["eager"], awkward[form]), (awkward[form], awkward["eager"])):
        result = tap.compare(one, other)
        assert result.same and result.counts["identical"] >= 13 and not result.warnings
        assert set(result.counts) <= {"identical", "missing"}
        for row in result.layers:
            for part in row.parts:
                assert part.verdict in ("identical", "missing"), (row.layer, part)
                assert part.verdict == "identical" or ": " in part.why, part.why
            if row.verdict == "missing":
                assert ": " in row.note, row.note
    if form == "scripted":
        assert result.counts == {"identical": 16}
    assert check(awkward[form]) == []


def test_two_programs_of_one_model(awkward: dict[str, Path]) -> None:
    result = tap.compare(awkward["traced"], awkward["exported"])
    assert result.same and result.counts["identical"] >= 13
    names = {item.name: (item.reference, item.candidate) for item in result.environment}
    assert names["runtime"] == ("torchscript", "export")


def test_reasons_of_a_traced_model(awkward: dict[str, Path]) -> None:
    result = tap.compare(awkward["eager"], awkward["traced"])
    assert "passes its input on" in result["same"].note
    assert "nothing reads what it returns" in result["unused"].note
    found = parts(result["named"])
    assert found["['scores']"][0] == "missing" and "dropped it" in found["['scores']"][1]
    done = CliRunner().invoke(app, ["compare", str(awkward["eager"]), str(awkward["traced"])])
    assert done.exit_code == 0 and "hook / scope" in done.output
    shown = CliRunner().invoke(app, ["show", str(awkward["traced"])]).output
    assert "self-check: output identical with and without taps" in shown


def test_a_bug_in_a_compiled_model_is_found_where_it_is(
    awkward: dict[str, Path], tmp_path: Path
) -> None:
    model, args, kwargs = MODELS["awkward"]()
    with torch.no_grad():
        model.get_submodule("split.narrow").weight.mul_(1.5)
    traced = torch.jit.trace(model, args, strict=False, check_trace=False)
    with tap.record(traced, tmp_path / "bug", layers="all", inputs=True) as rec:
        rec.run(*args, **kwargs)
    first = tap.compare(awkward["eager"], tmp_path / "bug").first_divergence
    assert first is not None
    assert (first.layer, first.origin) == ("split.narrow", "made here")


def test_while_a_program_runs(awkward: dict[str, Path], tmp_path: Path) -> None:
    """Streaming says what comparing two recordings says."""
    model, args, kwargs = MODELS["awkward"]()
    traced = torch.jit.trace(model, args, strict=False, check_trace=False)
    options: dict[str, Any] = {"layers": "all", "inputs": True}
    with tap.record(traced, tmp_path / "t", against=awkward["eager"], **options) as rec:
        rec.run(*args, **kwargs)
    options["against"] = awkward["traced"]
    with torch.no_grad(), tap.record(model, tmp_path / "e", **options) as other_way:
        other_way.run(*args, **kwargs)
    for found, one, other in (
        (rec.comparison, "eager", "traced"),
        (other_way.comparison, "traced", "eager"),
    ):
        expected = tap.compare(awkward[one], awkward[other])
        assert found.counts == expected.counts
        for row in expected.layers:
            live = found[row.layer]
            assert (live.verdict, live.note) == (row.verdict, row.note)
            assert live.provenance == row.provenance
            assert live.candidate_provenance == row.candidate_provenance


def test_a_program_inside_an_object(awkward: dict[str, Path], tmp_path: Path) -> None:
    """Seed 001: `models[0].model` is compiled; its layers stand behind that path."""
    model, args, kwargs = MODELS["awkward"]()

    class Wrapper:
        def __init__(self, program: Any) -> None:
            self.model = program

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)

    class Application:
        def __init__(self, program: Any) -> None:
            self.models = [Wrapper(program)]

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.models[0](*args, **kwargs)

    held = Application(torch.jit.trace(model, args, strict=False, check_trace=False))
    with tap.record(held, tmp_path / "held", layers="all", inputs=True) as rec:
        rec.run(*args, **kwargs)
    result = tap.compare(awkward["eager"], tmp_path / "held")
    assert result["cached"].candidate_layer == "models.0.model.cached"
    alone = tap.compare(awkward["eager"], awkward["traced"])
    assert result.counts["identical"] == alone.counts["identical"]
    # The object has a root of its own, so the part's has no partner.
    beyond = {row.layer for row in result.layers} - {row.layer for row in alone.layers}
    assert beyond == {"models.0.model"}
    assert "passes its input on" in result["same"].note
    assert result[""].verdict == "identical"


def test_arguments_by_name_and_by_position_are_the_same_inputs(tmp_path: Path) -> None:
    model = torch.nn.Bilinear(3, 4, 2)
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    traced = torch.jit.trace(model, (x, y))
    runs = {
        "eager": (model, (x, y), {}),
        "named": (traced, (), {"input2": y, "input1": x}),
        "other": (traced, (), {"input2": y, "input1": -x}),
    }
    for name, (program, args, kwargs) in runs.items():
        with torch.no_grad(), tap.record(program, tmp_path / name, layers="") as rec:
            rec.run(*args, **kwargs)
    same = tap.compare(tmp_path / "eager", tmp_path / "named")
    assert same.same_input is True and not same.warnings and same[""].verdict == "identical"
    assert "inputs" not in {item.name for item in same.environment}
    other = tap.compare(tmp_path / "eager", tmp_path / "other")
    assert other.same_input is False and "different inputs" in other.warnings[0]
    assert "inputs" in {item.name for item in other.environment}
