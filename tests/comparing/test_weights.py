"""Two checkpoints: every weight is said to be the same, or what became of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tensortap as tap
from tensortap.cli.main import main
from tensortap.errors import OptionError

Weights = dict[str, Tensor]
CONFIG = {"hidden_size": 32, "rope": {"theta": 10000.0}, "_name_or_path": "a", "dtype": "float32"}


def make_weights() -> Weights:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = {"embedding.weight": drawn(50, 32)}
    for number in range(3):
        made[f"layers.{number}.q_proj.weight"] = drawn(32, 32)
        made[f"layers.{number}.gate_proj.weight"] = drawn(48, 32)
        made[f"layers.{number}.up_proj.weight"] = drawn(48, 32)
        made[f"layers.{number}.norm.weight"] = 1 + 0.1 * drawn(32)
    made["lm_head.weight"] = made["embedding.weight"].clone()
    return made


def _moved(weights: Weights, a: str, b: str) -> None:
    weights[a], weights[b] = weights[b], weights[a]


Q = "layers.1.q_proj.weight"


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: change(weights[name]).contiguous()})


def _renamed(weights: Weights) -> None:
    weights["layers.1.self_attn.query.weight"] = weights.pop(Q)


def _noisy(x: Tensor) -> Tensor:
    return x + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


def _row(x: Tensor) -> Tensor:
    x = x.clone()
    x[7] = 0
    return x


CASES: dict[str, tuple[Callable[[Weights], object], str, str, str]] = {
    "scaled": (_changed(Q, lambda x: 1.02 * x), "diverged", "factor", "1.02 x reference"),
    "transposed": (_changed(Q, lambda x: x.T), "diverged", "transposed", "transposed"),
    "rows": (_changed(Q, lambda x: x.roll(8, 0)), "diverged", "permutation", "rows"),
    "columns": (_changed(Q, lambda x: x[:, torch.arange(31, -1, -1)]), "diverged",
                "permutation", "reverse"),
    "one row": (_changed(Q, _row), "diverged", "places", "row 7 of 32 alone"),
    "trained on": (_changed(Q, _noisy), "diverged", "changed", "other values (relative"),
    "bf16": (_changed(Q, lambda x: x.bfloat16()), "within", "rounded", "rounded to bfloat16"),
    "bf16, kept": (_changed(Q, lambda x: x.bfloat16().float()), "within", "rounded", "kept as"),
    "shape": (_changed(Q, lambda x: x[:16]), "incomparable", "shape", "[16, 32] instead of"),
    "missing": (lambda weights: weights.pop(Q), "missing", "missing", "does not have it"),
    "renamed": (_renamed, "identical", "renamed", "self_attn.query.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_became_of_a_weight(name: str, tmp_path: Path) -> None:
    change, verdict, how, words = CASES[name]
    weights = make_weights()
    change(weights)
    result = tap.compare_weights(save(tmp_path / "a"), save(tmp_path / "b", weights))
    (row,) = [row for row in result.weights if row.name == Q]
    assert (row.verdict, row.how) == (verdict, how), row
    assert words in row.text
    assert result.same == (verdict in ("identical", "within"))
    assert [r.name for r in result.weights if r.how] == [Q]


def test_the_same_weights_are_the_same(tmp_path: Path) -> None:
    result = tap.compare_weights(save(tmp_path / "a"), save(tmp_path / "b"))
    assert result
    assert result.sentence == "The weights are the same: 14 of 14."


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("layers.0.q_proj.weight", "layers.1.q_proj.weight"),
        ("layers.1.gate_proj.weight", "layers.1.up_proj.weight"),
    ],
)
def test_weights_that_stand_in_another_place(a: str, b: str, tmp_path: Path) -> None:
    weights = make_weights()
    _moved(weights, a, b)
    result = tap.compare_weights(save(tmp_path / "a"), save(tmp_path / "b", weights))
    found = {row.name: (row.how, row.text) for row in result.differing}
    assert found == {
        a: ("moved", f"holds what is {b} in the reference"),
        b: ("moved", f"holds what is {a} in the reference"),
    }


def test_a_tied_weight_is_not_missing(tmp_path: Path) -> None:
    weights = make_weights()
    del weights["lm_head.weight"]
    for left, right in ((make_weights(), weights), (weights, make_weights())):
        result = tap.compare_weights(save(tmp_path / "a", left), save(tmp_path / "b", right))
        assert result
        (row,) = [row for row in result.weights if row.how]
        assert (row.name, row.how, row.verdict) == ("lm_head.weight", "tied", "identical")


def test_wrappers_and_prefixes_are_no_other_names(tmp_path: Path) -> None:
    weights = {f"module.model.{name}": 2 * tensor for name, tensor in make_weights().items()}
    result = tap.compare_weights(save(tmp_path / "a"), save(tmp_path / "b", weights))
    assert {row.how for row in result.weights} == {"factor"}


def test_norms_with_the_same_values_keep_to_their_own_names(tmp_path: Path) -> None:
    """Under another prefix a norm of ones has the values of every other norm."""
    weights = make_weights()
    weights.update({name: torch.ones(32) for name in weights if "norm" in name})
    ours = {f"model.{name}": tensor for name, tensor in weights.items()}
    theirs = {f"transformer.{name}": tensor for name, tensor in weights.items()}
    result = tap.compare_weights(save(tmp_path / "a", ours), save(tmp_path / "b", theirs))
    assert {row.candidate_name for row in result.weights} == set(theirs)
    assert all(
        row.how == "renamed" and row.name[6:] == str(row.candidate_name)[12:]
        for row in result.weights
        if "norm" in row.name
    )


def test_two_roundings_of_the_same_values_are_the_same(tmp_path: Path) -> None:
    weights = make_weights()
    for sides in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        a, b = ({name: t.to(kind) for name, t in weights.items()} for kind in sides)
        assert tap.compare_weights(save(tmp_path / "a", a), save(tmp_path / "b", b))
        b[Q] = (weights[Q] * 1.002).to(sides[1])
        found = tap.compare_weights(save(tmp_path / "a", a), save(tmp_path / "b", b))
        assert [row.name for row in found.differing] == [Q]


def test_tensors_deep_in_a_dict_are_found(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "net": {"ema": make_weights()}}, tmp_path / "b.pt")
    assert tap.compare_weights(save(tmp_path / "a"), str(tmp_path / "b.pt"))


@pytest.mark.parametrize(
    ("kind", "said"),
    [("module", "holds more than tensors"), ("text", "is damaged"), ("none", "holds no tensors")],
)
def test_what_is_no_dict_of_tensors_gets_a_plain_sentence(
    kind: str, said: str, tmp_path: Path
) -> None:
    bad = tmp_path / "b.pt"
    if kind == "text":
        bad.write_text("hello")
    else:
        torch.save(torch.nn.Linear(2, 2) if kind == "module" else {"step": 3}, bad)
    with pytest.raises(OptionError, match=said) as found:
        tap.compare_weights(str(save(tmp_path / "a")), str(bad))
    assert "\x1b" not in str(found.value)


def test_shards_pickles_and_files_are_one(tmp_path: Path) -> None:
    weights = make_weights()
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = list(weights)
    for number, part in enumerate((names[:6], names[6:])):
        save_file({n: weights[n] for n in part}, folder / f"model-{number}.safetensors")
    index = {n: f"model-{int(i >= 6)}.safetensors" for i, n in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    torch.save({"state_dict": weights, "step": 3}, tmp_path / "b.pt")
    single = save(tmp_path / "a")
    assert tap.compare_weights(f"hf:{folder}", str(single / "model.safetensors"))
    assert tap.compare_weights(str(single), str(tmp_path / "b.pt"))


def test_configs_are_compared_key_by_key(tmp_path: Path) -> None:
    other = {**CONFIG, "rope": {"theta": 500000.0}, "_name_or_path": "b", "dtype": "bfloat16"}
    result = tap.compare_weights(save(tmp_path / "a"), save(tmp_path / "b", config=other))
    (found,) = result.config
    assert (found.name, found.reference, found.candidate) == ("rope.theta", "10000.0", "500000.0")
    assert not result
    assert "1 config entry differs: rope.theta" in result.sentence


@pytest.mark.parametrize("kind", ["cut", "text", "pickle", "index", "nothing", "folder"])
def test_bad_files_get_a_sentence(kind: str, tmp_path: Path) -> None:
    good = save(tmp_path / "a")
    bad = tmp_path / "b"
    bad.mkdir()
    if kind == "cut":
        whole = (good / "model.safetensors").read_bytes()
        (bad / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    elif kind == "text":
        (bad / "model.safetensors").write_text("no tensors")
    elif kind == "pickle":
        torch.save({"model": torch.nn.Linear(2, 2)}, bad / "model.pt")
    elif kind == "index":
        index = {"weight_map": {"x": "gone.safetensors"}}
        (bad / "model.safetensors.index.json").write_text(json.dumps(index))
    path = str(tmp_path / "c") if kind == "nothing" else str(bad)
    with pytest.raises(OptionError, match=r"'.*'"):
        tap.compare_weights(str(good), path)


def save(folder: Path, weights: Weights | None = None, config: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    made = make_weights() if weights is None else weights
    save_file({name: tensor.contiguous() for name, tensor in made.items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = make_weights()
    weights[Q] = weights[Q] * 1.02
    a, b = save(tmp_path / "a"), save(tmp_path / "b", weights)
    assert command("compare", f"hf:{a}", f"hf:{a}") == 0
    assert "The weights are the same: 14 of 14." in capsys.readouterr().out
    assert command("compare", f"hf:{a}", str(b)) == 1
    assert "1 of 14 weights differ (1 factor)" in capsys.readouterr().out
    assert command("compare", f"hf:{a}", str(b), "--json") == 1
    assert json.loads(capsys.readouterr().out)["counts"] == {"identical": 13, "diverged": 1}
    (tmp_path / "run").mkdir()
    assert command("compare", f"hf:{a}", str(tmp_path / "run")) == 2
    assert "is a checkpoint and" in capsys.readouterr().err
    assert command("compare", f"hf:{a}", str(b), "--floor", "x") == 2


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_what_was_changed_a_little_is_not_rounded(tmp_path: Path) -> None:
    """Ones are what is near to them rounded to anything."""
    ones, near = torch.ones(64), torch.ones(64)
    near[3] = 1.003
    save_file({"norm": ones}, tmp_path / "a.safetensors")
    save_file({"norm": near}, tmp_path / "b.safetensors")
    for first, second in (("a", "b"), ("b", "a")):
        found = tap.compare_weights(
            tmp_path / f"{first}.safetensors", tmp_path / f"{second}.safetensors"
        )
        assert [row.verdict for row in found.weights] == ["diverged"]
