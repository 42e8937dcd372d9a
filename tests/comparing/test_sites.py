"""Which tensors of two paired layers are compared, and through which layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net
from tensortap.comparing.align import LayerPair, align
from tensortap.comparing.sites import SitePair, SitePairer
from tensortap.recording.schema import Manifest, Row
from tensortap.recording.writer import Writer

Recorded = Callable[..., tap.Recording]
Write = Callable[..., tap.Recording]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A recording of given tensors: {layer: tensor} or [(row, tensor), ...]."""
    count = 0

    def make(items: Any) -> tap.Recording:
        nonlocal count
        count += 1
        path = tmp_path / f"written{count}"
        if isinstance(items, dict):
            items = [(Row(layer, "output"), tensor) for layer, tensor in items.items()]
        writer = Writer(str(path), Manifest())
        for order, (row, tensor) in enumerate(items):
            writer.add(Row(**{**vars(row), "order": order}), tensor)
        writer.close()
        return tap.open(path)

    return make


def pair_all(reference: tap.Recording, candidate: tap.Recording) -> list[SitePair]:
    pairer = SitePairer(reference, candidate)
    return [site for pair in align(reference, candidate) for site in pairer.pair(pair)]


def only(reference: tap.Recording, candidate: tap.Recording) -> SitePair:
    (site,) = pair_all(reference, candidate)
    return site


def name(site: SitePair) -> str | None:
    return None if site.transform is None else site.transform.name


def assert_equal(sites: Iterable[SitePair], **tolerance: float) -> None:
    for site in sites:
        assert site.moments and not site.problem and not site.missing, site
        for moment in site.moments:
            ours, theirs = moment.tensors(site.transform)
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, **tolerance)


def stepped(recorded: Recorded, model: nn.Module, batches: Iterable[torch.Tensor]) -> tap.Recording:
    """One recording of several batches, each a step."""
    path = recorded(model, next(iter(batches))).path + "-steps"
    with torch.no_grad(), tap.record(model, path, layers="all", inputs=True) as rec:
        for batch in batches:
            model(batch)
            rec.step()
    return tap.open(path)


torch.manual_seed(0)
X = torch.randn(4, 5, 6)


# --- ports, leaves, moments ------------------------------------------------------------------


def test_equal_runs_need_no_transform(net, ids, recorded: Recorded):
    reference, candidate = (recorded(net, ids, inputs=True) for _ in range(2))
    sites = pair_all(reference, candidate)
    assert {site.port for site in sites} == {"input", "output"}
    assert all(site.transform is None and site.unpaired == () for site in sites)
    assert_equal(sites, rtol=0, atol=0)


def test_a_lone_layer_has_no_sites(net, ids, recorded: Recorded):
    run = recorded(net, ids)
    pairer = SitePairer(run, run)
    assert pairer.pair(LayerPair(run["head"], None, "")) == []
    assert pairer.pair(LayerPair(None, run["head"], "")) == []


def test_a_port_that_one_side_lacks_is_missing_there(net, ids, recorded: Recorded):
    full = recorded(net, ids, layers="head", inputs=True)
    lean = recorded(net, ids, layers="head")
    assert {(s.port, s.missing) for s in pair_all(full, lean)} == {
        ("input", "candidate"),
        ("output", ""),
    }
    assert {(s.port, s.missing) for s in pair_all(lean, full)} == {
        ("input", "reference"),
        ("output", ""),
    }


def test_a_plain_tensor_and_a_tuple_of_one(write: Write):
    site = only(write([(Row("a", "output"), X)]), write([(Row("a", "output", leaf="[0]"), X)]))
    assert (site.leaf, site.candidate_leaf, site.missing) == ("", "[0]", "")
    assert_equal([site])


def test_a_plain_tensor_and_a_tuple_with_more(write: Write):
    more = [(Row("a", "output", leaf="[0]"), X), (Row("a", "output", leaf="[1]"), X[0])]
    sites = pair_all(write({"a": X}), write(more))
    assert [(s.leaf, s.candidate_leaf, s.missing) for s in sites] == [
        ("", "[0]", ""),
        ("[1]", "[1]", "reference"),
    ]
    # Where the values do not agree, the first leaf of the same shape is meant.
    more = [(Row("a", "output", leaf="[0]"), X.roll(1)), (Row("a", "output", leaf="[1]"), X[0])]
    sites = pair_all(write({"a": X}), write(more))
    assert (sites[0].leaf, sites[0].candidate_leaf) == ("", "[0]")


def test_leaves_under_other_names_pair_by_their_values(write: Write):
    ours = [
        (Row("a", "input", leaf="['hidden_states']"), X),
        (Row("a", "input", leaf="['cos']"), X[0].cos()),
        (Row("a", "input", leaf="['sin']"), X[0].sin()),
    ]
    theirs = [
        (Row("a", "input", leaf="[0]"), X),
        (Row("a", "input", leaf="[1]"), X[0].sin()),
        (Row("a", "input", leaf="[2]"), X[0].cos()),
        (Row("a", "input", leaf="[3]"), X[1]),
    ]
    sites = pair_all(write(ours), write(theirs))
    assert [(s.leaf, s.candidate_leaf, s.missing) for s in sites] == [
        ("['hidden_states']", "[0]", ""),
        ("['cos']", "[2]", ""),
        ("['sin']", "[1]", ""),
        ("[3]", "[3]", "reference"),
    ]


def test_leaves_that_paired_once_pair_again(write: Write):
    """At the second layer the values diverged; the first has shown which leaf is which."""

    def rows(layer: str, leaves: str, *values: torch.Tensor) -> list[tuple[Row, torch.Tensor]]:
        return [
            (Row(layer, "output", leaf=f"[{leaf}]"), value)
            for leaf, value in zip(leaves, values, strict=True)
        ]

    ours = rows("a", "01", X, X[0]) + rows("b", "01", X, X[0])
    theirs = rows("a", "xyz", X[1], X, X[0]) + rows("b", "xyz", X[1], -X, -X[0])
    sites = [s for s in pair_all(write(ours), write(theirs)) if not s.missing]
    assert [(s.leaf, s.candidate_leaf) for s in sites] == [
        ("[0]", "[y]"),
        ("[1]", "[z]"),
        ("[0]", "[y]"),
        ("[1]", "[z]"),
    ]


def test_moments_pair_by_epoch_batch_and_call(write: Write):
    def rows(moments: list[tuple[int, int, int]]) -> list[tuple[Row, torch.Tensor]]:
        return [
            (Row("a", "output", epoch=e, batch=b, call=c), X * (1 + e + 2 * b + 4 * c))
            for e, b, c in moments
        ]

    reference = write(rows([(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]))
    candidate = write(rows([(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 3, 2)]))
    site = only(reference, candidate)
    assert [(m.epoch, m.batch, m.call) for m in site.moments] == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert site.unpaired == (
        "batch 0 only in the reference",
        "epoch 1, batch 3, call 2 only in the candidate",
    )
    assert_equal([site])


def test_no_moment_in_common(write: Write):
    reference = write([(Row("a", "output", batch=0), X)])
    candidate = write([(Row("a", "output", batch=5), X.roll(1))])
    site = only(reference, candidate)
    assert site.moments == ()
    assert "no moment in common" in site.problem


def test_a_module_that_runs_twice(recorded: Recorded):
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = torch.randn(3, 6)
    sites = pair_all(recorded(model, x), recorded(model, x))
    assert len(sites[0].moments) == 2
    assert_equal(sites)


# --- other layouts ---------------------------------------------------------------------------

LAYOUTS = {
    "permute (0, 2, 1)": (X, X.transpose(1, 2)),
    "permute (2, 1, 0)": (X, X.permute(2, 1, 0)),
    "squeeze axis 1 of the candidate": (X, X[:, None]),
    "flatten axes 0..1 of the reference": (X, X.flatten(0, 1)),
    "flatten axes 1..2 of the candidate": (X.flatten(1), X),
    "padding: first 5 of 7 on axis 1": (X, nn.functional.pad(X, (0, 0, 0, 2))),
    "padding: last 5 of 7 on axis 1": (nn.functional.pad(X, (0, 0, 2, 0)), X),
    "padding: first 6 of 8 on axis 2": (X, nn.functional.pad(X, (0, 2), value=9.0)),
    "samples 0..1 of 4": (X, X[:2]),
    "samples 1..2 of 4": (X[1:3], X),
    "samples 2..3 of 4, permute (0, 2, 1)": (X, X[2:].transpose(1, 2)),
    "samples 0..1 of 4, padding: last 5 of 6 on axis 1": (
        X[:2],
        nn.functional.pad(X, (0, 0, 1, 0)),
    ),
}


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("wanted", LAYOUTS)
def test_a_layout_that_the_values_confirm(write: Write, wanted: str, noise: float):
    ours, theirs = LAYOUTS[wanted]
    theirs = theirs + noise * torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    site = only(write({"a": ours}), write({"a": theirs.contiguous()}))
    assert name(site) == wanted
    assert_equal([site], rtol=0, atol=8 * noise)


@pytest.mark.parametrize("wanted", LAYOUTS)
def test_a_layout_that_the_values_refute_is_a_problem(write: Write, wanted: str):
    ours, theirs = LAYOUTS[wanted]
    theirs = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    site = only(write({"a": ours}), write({"a": theirs}))
    if wanted.startswith("squeeze"):  # which no values can refute: then they diverged
        assert name(site) == wanted and not site.problem
        return
    assert site.transform is None
    assert str(list(ours.shape)) in site.problem and str(list(theirs.shape)) in site.problem
    assert "tried" in site.problem


def test_shapes_that_nothing_connects(write: Write):
    site = only(write({"a": torch.randn(3, 5)}), write({"a": torch.randn(7, 11)}))
    assert "[3, 5] in the reference, [7, 11] in the candidate" in site.problem
    assert site.transform is None and len(site.moments) == 1


def test_a_diverged_layer_gets_the_layout_of_those_before_it(write: Write):
    y = torch.randn(4, 3, 7)
    reference = write({"a": X, "b": y})
    candidate = write({"a": X.transpose(1, 2).contiguous(), "b": torch.randn(4, 7, 3)})
    first, second = pair_all(reference, candidate)
    assert name(first) == "permute (0, 2, 1)"
    assert name(second) == "permute (0, 2, 1), as in 'a'"
    assert not second.problem
    ours, theirs = second.moments[0].tensors(second.transform)
    assert ours.shape == theirs.shape == (4, 3, 7)


def test_a_layout_is_not_believed_of_the_other_side(write: Write):
    """The candidate's first layer is transposed; the second lacks a part, which is no layout."""
    reference = write({"a": X, "b": torch.randn(4, 3, 7)})
    candidate = write({"a": X.transpose(1, 2).contiguous(), "b": torch.randn(4, 3, 6)})
    _, second = pair_all(reference, candidate)
    assert second.problem and second.transform is None


def test_equal_extents_that_were_swapped_are_a_mistake_with_a_hint(write: Write):
    square = torch.randn(3, 8, 8)
    site = only(write({"a": square}), write({"a": square.transpose(1, 2).contiguous()}))
    assert name(site) is None and not site.problem
    assert site.hint == "the values agree under 'permute (0, 2, 1)' of the candidate"


def test_channels_that_are_no_padding_are_not_cut_off(write: Write):
    wide = torch.randn(2, 5, 9)
    site = only(write({"a": wide}), write({"a": wide[..., :-1].contiguous()}))
    assert "The shapes do not fit: [2, 5, 9]" in site.problem
    filled = nn.functional.pad(wide, (0, 3))
    site = only(write({"a": wide}), write({"a": filled}))
    assert name(site) == "padding: first 9 of 12 on axis 2"
    assert site.cut


def test_equal_extents_that_are_as_they_were(write: Write):
    square = torch.randn(3, 8, 8)
    noisy = square + 0.3 * torch.randn(3, 8, 8)
    assert name(only(write({"a": square}), write({"a": noisy}))) is None
    nearly = square.transpose(1, 2) + 0.1 * torch.randn(3, 8, 8)
    site = only(write({"a": square}), write({"a": nearly.contiguous()}))
    assert name(site) is None and not site.problem  # a divergence, not a layout


def test_swapped_extents_are_known_from_layers_that_cannot_hide_them(write: Write):
    square = torch.randn(3, 8, 8)
    swapped = square.transpose(1, 2) + 0.3 * torch.randn(3, 8, 8)
    reference = write({"a": X, "b": square})
    candidate = write({"a": X.transpose(1, 2).contiguous(), "b": swapped.contiguous()})
    _, second = pair_all(reference, candidate)
    assert name(second) == "permute (0, 2, 1), as in 'a'"


def test_a_transposed_weight_is_no_layout(recorded: Recorded):
    torch.manual_seed(0)
    good, bad = nn.Linear(8, 8), nn.Linear(8, 8)
    with torch.no_grad():
        bad.weight.copy_(good.weight.T)
        bad.bias.copy_(good.bias)
    x = torch.randn(8, 8, 8)
    site = only(recorded(good, x), recorded(bad, x))
    assert name(site) is None and not site.problem


def test_swapped_heads_are_no_layout(write: Write):
    heads = torch.randn(2, 4, 4, 4)
    plain, swapped = heads.flatten(2), heads.flip(2).flatten(2)
    site = only(write({"a": plain}), write({"a": swapped}))
    assert name(site) is None and not site.problem


def test_zeros_fit_any_layout_and_prove_none(write: Write):
    reference = write({"a": torch.zeros(2, 3, 4), "b": X})
    candidate = write({"a": torch.zeros(2, 4, 3), "b": torch.randn(4, 6, 5)})
    first, second = pair_all(reference, candidate)
    assert name(first) == "permute (0, 2, 1)" and not first.problem
    assert second.problem


def test_channels_last_through_a_model(recorded: Recorded):
    class Model(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.last = last
            self.conv = nn.Conv2d(3, 6, 3, padding=1)
            self.act = nn.ReLU()
            self.pool = nn.AdaptiveAvgPool2d(1)
            self.fc = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            if not self.last:
                return self.fc(self.pool(self.act(y)).flatten(1))
            y = self.act(y.permute(0, 2, 3, 1).contiguous())
            return self.fc(self.pool(y.permute(0, 3, 1, 2)).flatten(1))

    torch.manual_seed(0)
    first, last = Model(False), Model(True)
    last.load_state_dict(first.state_dict())
    x = torch.randn(2, 3, 7, 5)
    sites = pair_all(recorded(first, x, inputs=True), recorded(last, x, inputs=True))
    assert_equal(sites)
    assert [name(site) for site in sites].count("permute (0, 3, 1, 2)") == 2


def test_a_layout_must_fit_at_every_moment(write: Write):
    y = torch.randn(12)
    reference = write([(Row("a", "output"), X), (Row("a", "output", batch=1), y.reshape(3, 4))])
    theirs = X.transpose(1, 2).contiguous()
    candidate = write([(Row("a", "output"), theirs), (Row("a", "output", batch=1), y.view(2, 6))])
    site = only(reference, candidate)
    assert "[3, 4] in the reference, [2, 6] in the candidate at batch 1" in site.problem


def test_generation_with_left_padding(write: Write):
    """The prompt is padded on one side; each next token has a place of its own."""
    prompt, token = torch.randn(2, 5, 8), torch.randn(2, 1, 8)
    padded = nn.functional.pad(prompt, (0, 0, 3, 0))
    calls = lambda *values: [(Row("a", "output", call=n), v) for n, v in enumerate(values)]  # noqa: E731
    site = only(write(calls(prompt, token)), write(calls(padded, token)))
    assert name(site) == "padding: last 5 of 8 on axis 1"
    assert_equal([site])


# --- samples in other batches ----------------------------------------------------------------

SPLITS = {
    (8,): ((8,), None),
    (2,): ((8,), "samples 0..1 of 8"),
    (2, 2, 2, 2): ((8,), "samples: 1 batch of 8 against 4 batches of 2"),
    (5, 3): ((3, 3, 2), "samples: 3 batches of 2 to 3 against 2 batches of 3 to 5"),
    (1,) * 8: ((4, 4), "samples: 2 batches of 4 against 8 batches of 1"),
    (4, 4): ((2, 2, 2), "samples: 3 batches of 2 against 2 batches of 4"),
}


@pytest.mark.parametrize("theirs", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_in_other_batches(recorded: Recorded, theirs: tuple[int, ...], dtype: torch.dtype):
    ours, wanted = SPLITS[theirs]
    torch.manual_seed(0)
    net = Net(blocks=1).eval()
    samples = torch.randint(0, 16, (8, 6))
    reference = stepped(recorded, net, samples[: sum(ours)].split(ours))
    candidate = stepped(recorded, net.to(dtype), samples[: sum(theirs)].split(theirs))
    sites = pair_all(reference, candidate)
    assert {name(site) for site in sites} == {wanted}
    assert_equal(sites, check_dtype=False, rtol=0.05, atol=0.1)
    for site in sites:
        rows = sum(m.tensors(site.transform)[0].shape[0] for m in site.moments)
        assert rows == min(sum(ours), sum(theirs))
        assert len(site.unpaired) == (1 if sum(ours) != sum(theirs) else 0)


def test_samples_as_calls_of_one_batch(recorded: Recorded):
    torch.manual_seed(0)
    net = Net(blocks=1).eval()
    samples = torch.randint(0, 16, (4, 6))
    reference = recorded(net, samples)
    candidate = recorded(net, call=lambda: [net(row[None]) for row in samples])
    sites = pair_all(reference, candidate)
    assert {name(site) for site in sites} == {"samples: 1 batch of 4 against 4 batches of 1"}
    assert all(len(site.moments) == 4 and not site.unpaired for site in sites)
    assert_equal(sites)


def test_the_first_samples_of_each_batch(recorded: Recorded):
    torch.manual_seed(0)
    net = Net(blocks=1).eval()
    samples = torch.randint(0, 16, (2, 4, 6))
    reference = stepped(recorded, net, samples)
    candidate = stepped(recorded, net, samples[:, :2])
    sites = pair_all(reference, candidate)
    assert {name(site) for site in sites} == {"samples 0..1 of 4 in each batch"}
    assert_equal(sites)


def test_a_diverged_layer_gets_the_samples_of_those_before_it(write: Write):
    reference = write({"a": X, "b": torch.randn(4, 5, 6)})
    candidate = write({"a": X[:2], "b": torch.randn(2, 5, 6)})
    _, second = pair_all(reference, candidate)
    assert name(second) == "samples 0..1 of 4, as in 'a'"
    assert second.moments[0].reference_samples == (0, 2)
    assert second.moments[0].candidate_samples is None


# --- summaries alone -------------------------------------------------------------------------


def summarised(recorded: Recorded, tensor: torch.Tensor, **options: Any) -> tap.Recording:
    return recorded(nn.Identity(), tensor, **{"keep": "summary", **options})


def test_summaries_of_equal_shapes(recorded: Recorded):
    site = only(summarised(recorded, X, keep="tensors"), summarised(recorded, X))
    assert site.transform is None and not site.problem and len(site.moments) == 1


def test_summaries_of_another_layout_say_so(recorded: Recorded):
    site = only(summarised(recorded, X), summarised(recorded, X.flatten(0, 1)))
    assert not site.problem
    assert name(site) == (
        "summaries alone: [4, 5, 6] in the reference, [20, 6] in the candidate, as many elements"
    )


def test_summaries_of_other_counts_are_a_problem(recorded: Recorded):
    site = only(summarised(recorded, X), summarised(recorded, X[:2]))
    assert "Record both sides with keep='tensors'" in site.problem


# --- bounded reading -------------------------------------------------------------------------


def test_only_a_sample_is_read(write: Write):
    """Finding a layout must not load the tensors: they may be larger than the memory."""
    torch.manual_seed(0)
    large = torch.randn(64, 512, 256)  # 32 MiB
    reference = write({"a": large})
    candidate = write({"a": large.transpose(1, 2).contiguous()})
    before = torch.autograd.profiler.profile(profile_memory=True)
    with before:
        site = only(reference, candidate)
    allocated = sum(max(event.cpu_memory_usage, 0) for event in before.function_events)
    assert name(site) == "permute (0, 2, 1)"
    assert allocated < large.numel() * 4 / 8
    ours, theirs = site.moments[0].tensors(site.transform)
    assert not theirs.is_contiguous() and torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("ours", "theirs"), [((4, 5), (7,)), ((3, 4), (3, 6)), ((2, 8, 8), (2, 4, 16))]
)
def test_constants_do_not_prove_that_padding_was_cut(
    ours: tuple[int, ...], theirs: tuple[int, ...], recorded: Recorded
) -> None:
    model = nn.Identity()
    left, right = recorded(model, torch.ones(ours)), recorded(model, torch.ones(theirs))
    pair = LayerPair(left[""], right[""], "name")
    (site,) = SitePairer(left, right).pair(pair)
    assert str(list(ours)) in site.problem
    assert str(list(theirs)) in site.problem
