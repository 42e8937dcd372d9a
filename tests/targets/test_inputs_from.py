"""Inputs from files: every format, every damage, every way in which they do not fit."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tensortap.errors import OptionError
from tensortap.taps.programs.base import Argument
from tensortap.targets import inputs_from as module
from tensortap.targets.fitting import Takes, fit
from tensortap.targets.inputs_from import read_inputs

IDS = torch.arange(6).reshape(2, 3)
MASK = torch.ones(2, 3)


def values(path: Path) -> dict[str, Any]:
    return {name: given.value for name, given in read_inputs(path).items()}


class TestFormats:
    def test_safetensors(self, tmp_path: Path) -> None:
        path = tmp_path / "in.safetensors"
        save_file({"ids": IDS, "mask": MASK.bfloat16(), "past.0.key": IDS[0].clone()}, path)
        found = values(path)
        assert sorted(found) == ["ids", "mask", "past.0.key"]
        assert torch.equal(found["ids"], IDS)
        assert found["mask"].dtype == torch.bfloat16

    def test_npz_by_name_and_by_position(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", ids=IDS.numpy(), mask=np.asfortranarray(MASK.numpy()))
        found = values(tmp_path / "a.npz")
        assert torch.equal(found["ids"], IDS) and torch.equal(found["mask"], MASK)
        np.savez_compressed(tmp_path / "b.npz", IDS.numpy(), MASK.numpy())
        assert torch.equal(values(tmp_path / "b.npz")["1"], MASK)

    @pytest.mark.parametrize("dtype", ["?", "i1", "u1", "<i4", ">i4", "<f2", ">f8", "<f4", "<c8"])
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_npy(self, tmp_path: Path, dtype: str, order: str) -> None:
        array = np.array(np.arange(6).reshape(3, 2), dtype=dtype, order=order)  # type: ignore[call-overload]
        np.save(tmp_path / "in.npy", array)
        assert np.array_equal(values(tmp_path / "in.npy")["0"].numpy(), array)

    def test_npy_of_one_number_and_of_none(self, tmp_path: Path) -> None:
        np.save(tmp_path / "one.npy", np.float32(2.5))
        np.save(tmp_path / "none.npy", np.zeros((0, 3), np.int64))
        assert values(tmp_path / "one.npy")["0"].shape == ()
        assert values(tmp_path / "none.npy")["0"].shape == (0, 3)

    def test_json(self, tmp_path: Path) -> None:
        path = tmp_path / "in.json"
        path.write_text('{"ids": [[1, 2]], "x": [0.5, -Infinity], "keep": [true], "n": 3}')
        found = values(path)
        assert found["ids"].dtype == torch.int64 and found["ids"].tolist() == [[1, 2]]
        assert found["x"].tolist() == [0.5, -float("inf")]
        assert found["keep"].dtype == torch.bool
        assert found["n"] == 3 and not isinstance(found["n"], torch.Tensor)
        path.write_text("[[1, 2], [3, 4]]")
        assert values(path)["0"].shape == (2, 2)


def refused(path: Path, *words: str) -> str:
    with pytest.raises(OptionError) as caught:
        read_inputs(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    for word in words:
        assert word in text
    return text


class TestDamage:
    def test_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "input.npz").touch()
        refused(tmp_path / "inputs.npz", "does not exist", "Did you mean", "input.npz")
        refused(tmp_path, "is a folder")
        refused(tmp_path / "no" / "folder.npz", "does not exist")

    @pytest.mark.parametrize(("name", "word"), [("in.pt", "pickle"), ("in.txt", "of no kind")])
    def test_kinds(self, tmp_path: Path, name: str, word: str) -> None:
        (tmp_path / name).write_text("1")
        refused(tmp_path / name, word, ".safetensors, .npz, .npy, .json")

    @pytest.mark.parametrize("name", ["in.safetensors", "in.npz", "in.npy", "in.json"])
    @pytest.mark.parametrize(
        "data", [b"", b"\x00" * 40, b"\x93NUMPY\x01\x00\xff\xff", b"PK\x03\x04"]
    )
    def test_rubbish(self, tmp_path: Path, name: str, data: bytes) -> None:
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name)

    @pytest.mark.parametrize("name", ["in.safetensors", "in.npz", "in.npy", "in.json"])
    def test_cut_short(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        big = torch.arange(500)
        if path.suffix == ".safetensors":
            save_file({"x": big}, path)
        elif path.suffix == ".npz":
            np.savez(path, x=big.numpy())
        elif path.suffix == ".npy":
            np.save(path, big.numpy())
        else:
            path.write_text(json.dumps({"x": big.tolist()}))
        path.write_bytes(path.read_bytes()[:-300])
        refused(path)

    def test_bytes_that_flip(self, tmp_path: Path) -> None:
        """Whatever a parser makes of it, a damaged file is read or refused in a sentence."""
        random = np.random.default_rng(0)
        save_file({"ids": IDS, "mask": MASK}, tmp_path / "in.safetensors")
        np.savez_compressed(tmp_path / "in.npz", ids=IDS.numpy(), mask=random.random((9, 9)))
        np.save(tmp_path / "in.npy", random.random((3, 4)))
        (tmp_path / "in.json").write_text('{"ids": [[1, 2], [3, 4]], "x": [0.5, 1e3], "n": 3}')
        refusals = 0
        for name in ("in.safetensors", "in.npz", "in.npy", "in.json"):
            whole = (tmp_path / name).read_bytes()
            path = tmp_path / f"bad{Path(name).suffix}"
            for _ in range(100):
                data = bytearray(whole)
                for place in random.integers(0, len(data), 4):
                    data[place] = random.integers(256)
                path.write_bytes(data)
                try:
                    fit(read_inputs(path), TAKES, path.name, "model.pt")
                except OptionError as error:
                    refusals += 1
                    assert "\n" not in str(error)
        assert refusals > 200

    def test_nothing_is_unpickled(self, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> Any:
                return Path(tmp_path / "boom").touch, ()

        np.save(tmp_path / "in.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
        refused(tmp_path / "in.npy", "Python objects")
        np.savez(tmp_path / "in.npz", x=np.array([Bomb()], dtype=object))
        refused(tmp_path / "in.npz", "'x'", "Python objects")
        (tmp_path / "raw.npy").write_bytes(pickle.dumps(Bomb()))
        refused(tmp_path / "raw.npy")
        assert not (tmp_path / "boom").exists()

    def test_a_header_that_boasts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def header(shape: tuple[int, ...]) -> bytes:
            buffer = io.BytesIO()
            about = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(buffer, about)
            return buffer.getvalue()

        (tmp_path / "a.npy").write_bytes(header((1 << 20, 1 << 20)) + b"\0" * 64)
        refused(tmp_path / "a.npy", "GiB")
        (tmp_path / "b.npy").write_bytes(header((1 << 20,)) + b"\0" * 64)
        refused(tmp_path / "b.npy", "more than its")
        with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
            archive.writestr("x.npy", header((1 << 20,)) + b"\0" * 64)
        refused(tmp_path / "c.npz", "'x'", "more than its")
        monkeypatch.setattr(module, "LARGEST", 1 << 20)
        np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(1 << 20))
        refused(tmp_path / "bomb.npz", "at most")
        save_file({"x": torch.zeros(1 << 19)}, tmp_path / "large.safetensors")
        refused(tmp_path / "large.safetensors", "at most")
        monkeypatch.setattr(module, "_LARGEST_TEXT", 1 << 4)
        (tmp_path / "large.json").write_text(" " * 40 + "[1]")
        refused(tmp_path / "large.json", "MiB of text")

    def test_odd_arrays(self, tmp_path: Path) -> None:
        np.save(tmp_path / "s.npy", np.array(["text"]))
        refused(tmp_path / "s.npy", "torch does not have")
        np.save(tmp_path / "r.npy", np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]))
        refused(tmp_path / "r.npy", "torch does not have")
        np.save(tmp_path / "l.npy", np.zeros(2, dtype=np.longdouble))
        refused(tmp_path / "l.npy", "torch does not have")
        with zipfile.ZipFile(tmp_path / "twice.npz", "w") as archive:
            buffer = io.BytesIO()
            np.save(buffer, IDS.numpy())
            archive.writestr("x.npy", buffer.getvalue())
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr("x.npy", buffer.getvalue())
        refused(tmp_path / "twice.npz", "'x' twice")
        with zipfile.ZipFile(tmp_path / "empty.npz", "w"):
            pass
        refused(tmp_path / "empty.npz", "holds nothing")

    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("{", "damaged"),
            ("3", "the number 3"),
            ("null", "null"),
            ("{}", "holds nothing"),
            ('{"x": "a"}', "in 'x' the text 'a'"),
            ('{"x": null}', "leave the argument out"),
            ('{"x": {"y": 1}}', "an object"),
            ('{"x": [1, "a"]}', "the text 'a'"),
            ('{"x": [1, null]}', "null"),
            ('{"x": [[1, 2], [3]]}', "do not fit together"),
            ('{"x": [true, 2]}', "true or false"),
            ('{"x": 1, "x": 2}', "'x' twice"),
            ("[9223372036854775808]", "does not fit into 64 bits"),
            ("[" + "9" * 5000 + "]", "does not fit into 64 bits"),
            ("[" * 100_000, "damaged"),
            ("[" * 80 + "1" + "]" * 80, "do not fit together"),
            ('{"x": [{"a": 1}]}', "an object"),
        ],
    )
    def test_json(self, tmp_path: Path, text: str, word: str) -> None:
        (tmp_path / "in.json").write_text(text)
        refused(tmp_path / "in.json", word)


TAKES = Takes(
    (
        Argument("ids", torch.int64, (None, 3)),
        Argument("mask", torch.float32, (2, 3)),
        Argument("scale", torch.float32, (), required=False),
    )
)


def fitted(path: Path, takes: Takes = TAKES) -> tuple[Any, list[str]]:
    return fit(read_inputs(path), takes, path.name, "model.pt")


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def test_values_lie_in_memory_as_torch_lays_them_out(tmp_path: Path) -> None:
    """Where they begin elsewhere, the same product may differ in its last bits."""
    names = {"".join(chr(97 + i) for i in range(n)): torch.ones(n) for n in range(1, 9)}
    for given in read_inputs(saved(tmp_path / "a.safetensors", **names)).values():
        assert isinstance(given.value, torch.Tensor)
        assert given.value.data_ptr() % 64 == 0


class TestFitting:
    def test_what_fits(self, tmp_path: Path) -> None:
        batch, notes = fitted(saved(tmp_path / "a.safetensors", ids=IDS, mask=MASK))
        assert batch.args == () and sorted(batch.kwargs) == ["ids", "mask"]
        assert notes == []

    def test_positions_are_positions(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", IDS.numpy(), MASK.numpy())
        batch, _ = fitted(tmp_path / "a.npz")
        assert len(batch.args) == 2 and torch.equal(batch.args[0], IDS)
        save_file({"1": MASK, "ids": IDS}, tmp_path / "b.safetensors")
        batch, _ = fitted(tmp_path / "b.safetensors")
        assert torch.equal(batch.kwargs["mask"], MASK) and torch.equal(batch.kwargs["ids"], IDS)

    def test_every_mismatch_is_named(self, tmp_path: Path) -> None:
        path = saved(
            tmp_path / "a.safetensors",
            idz=IDS,
            mask=torch.ones(2, 3, 1, dtype=torch.int32),
            scale=torch.ones(4),
        )
        with pytest.raises(OptionError) as caught:
            fitted(path)
        text = str(caught.value)
        assert text.startswith("a.safetensors does not fit model.pt: ")
        assert "'ids' is missing" in text
        assert "'idz' is unknown (did you mean 'ids'?)" in text
        assert "'mask' is int32, expected float32" in text
        assert "'mask' has 3 axes (2 x 3 x 1), expected 2 (2 x 3)" in text
        assert "'scale' has 1 axis (4), expected 0 (one number)" in text
        assert "It takes ids (int64, ? x 3), mask (float32, 2 x 3), [scale" in text
        assert "\n" not in text

    def test_positions_that_have_no_names(self, tmp_path: Path) -> None:
        takes = Takes((Argument("0"), Argument("mask")), by_name=True)
        with pytest.raises(OptionError) as caught:
            fitted(saved(tmp_path / "a.safetensors", ids=IDS, mask=MASK), takes)
        text = str(caught.value)
        assert "'0' is missing; 'ids' is unknown. It takes 0, mask." in text
        assert "a file gives them by position, as '0'" in text
        batch, _ = fitted(saved(tmp_path / "b.safetensors", mask=MASK, **{"0": IDS}), takes)
        assert set(batch.kwargs) == {"0", "mask"} and not batch.args

    def test_sizes(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "a.safetensors", ids=IDS[:, :2].clone(), mask=MASK)
        with pytest.raises(OptionError, match=r"'ids' is 2 x 2, expected \? x 3"):
            fitted(path)

    def test_twice_and_too_many(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        save_file({"0": IDS, "ids": IDS.clone(), "mask": MASK, "7": MASK.clone()}, path)
        with pytest.raises(OptionError) as caught:
            fitted(path)
        assert "'ids' is given twice, as '0' and as 'ids'" in str(caught.value)
        assert "there is no position 7, the last is 2" in str(caught.value)

    @pytest.mark.parametrize(
        ("given", "wanted", "note"),
        [
            (torch.tensor([1, 2], dtype=torch.int32), torch.int64, "every value kept"),
            (torch.tensor([1, 2]), torch.int32, "every value kept"),
            (torch.tensor([1, 2], dtype=torch.uint8), torch.int64, "every value kept"),
            (torch.tensor([0.5], dtype=torch.float16), torch.float32, "every value kept"),
            (torch.tensor([1 << 40]), torch.int32, None),
            (torch.tensor([-1]), torch.uint8, None),
            (torch.tensor([0.5]), torch.float16, None),
            (torch.tensor([0.5], dtype=torch.float64), torch.float32, None),
            (torch.tensor([1.0]), torch.int64, None),
            (torch.tensor([1]), torch.float32, None),
            (torch.tensor([True]), torch.int64, None),
            (torch.tensor([1]), torch.bool, None),
        ],
    )
    def test_casts(
        self, tmp_path: Path, given: torch.Tensor, wanted: torch.dtype, note: str | None
    ) -> None:
        takes = Takes((Argument("x", wanted),))
        path = saved(tmp_path / "a.safetensors", x=given)
        if note is None:
            with pytest.raises(OptionError, match=r"'x' is \w+, expected \w+"):
                fitted(path, takes)
            return
        batch, notes = fitted(path, takes)
        assert batch.kwargs["x"].dtype == wanted
        assert batch.kwargs["x"].tolist() == given.tolist()
        assert note in notes[0]

    def test_numpys_float64(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([0.1]))
        batch, notes = fitted(tmp_path / "a.npy", Takes((Argument("x", torch.float32),)))
        assert batch.args[0].dtype == torch.float32
        assert "float64 and was cast to float32" in notes[0]
        batch, notes = fitted(tmp_path / "a.npy", Takes((Argument("x", torch.float64),)))
        assert batch.args[0].dtype == torch.float64 and not notes

    @pytest.mark.parametrize(
        ("text", "wanted", "expected"),
        [
            ("[1, 2]", torch.float32, [1.0, 2.0]),
            ("[1, 0]", torch.bool, [True, False]),
            ("[true]", torch.int64, [1]),
            ("[1.0]", torch.int64, [1]),
            ("[0.5]", torch.bfloat16, [0.5]),
            ("[200]", torch.uint8, [200]),
            ("[]", torch.int64, []),
            ("[1.5]", torch.int64, None),
            ("[2]", torch.bool, None),
            ("[300]", torch.uint8, None),
            ("[-1]", torch.uint8, None),
            ("[16777217]", torch.float32, None),
            ("[NaN]", torch.int64, None),
        ],
    )
    def test_numbers_of_a_text(
        self, tmp_path: Path, text: str, wanted: torch.dtype, expected: list[Any] | None
    ) -> None:
        (tmp_path / "a.json").write_text(text)
        takes = Takes((Argument("x", wanted),))
        if expected is None:
            with pytest.raises(OptionError, match=r"'x' holds .*, expected"):
                fitted(tmp_path / "a.json", takes)
            return
        batch, _ = fitted(tmp_path / "a.json", takes)
        assert batch.args[0].dtype == wanted and batch.args[0].tolist() == expected

    def test_a_model_that_does_not_say(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "a.safetensors", anything=IDS)
        assert torch.equal(fitted(path, Takes.of(object()))[0].kwargs["anything"], IDS)
        save_file({"1": IDS}, tmp_path / "b.safetensors")
        with pytest.raises(OptionError, match="position 0 is missing"):
            fitted(tmp_path / "b.safetensors", Takes.of(object()))


class Takes3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, shift: Any = None) -> torch.Tensor:
        out = self.linear(x) * scale
        return out if shift is None else out + shift


class TestSignatures:
    def test_names(self, tmp_path: Path) -> None:
        with pytest.raises(OptionError) as caught:
            fitted(saved(tmp_path / "a.safetensors", skale=MASK), Takes.of(Takes3()))
        assert "'x' is missing; 'skale' is unknown (did you mean 'scale'?)" in str(caught.value)
        assert "It takes x, [scale], [shift]." in str(caught.value)

    def test_a_number_stays_a_number(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text('{"x": [[1.0, 2.0, 3.0]], "scale": 2.0}')
        batch, _ = fitted(tmp_path / "a.json", Takes.of(Takes3()))
        assert batch.kwargs["scale"] == 2.0 and isinstance(batch.kwargs["scale"], float)
        assert batch.kwargs["x"].dtype == torch.float32
        batch, _ = fitted(tmp_path / "a.json", Takes.of(Takes3().bfloat16()))
        assert batch.kwargs["x"].dtype == torch.bfloat16

    def test_numpys_float64_for_a_module(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.ones((2, 3)))
        batch, notes = fitted(tmp_path / "a.npy", Takes.of(Takes3()))
        assert batch.args[0].dtype == torch.float32 and notes
        batch, notes = fitted(tmp_path / "a.npy", Takes.of(Takes3().double()))
        assert batch.args[0].dtype == torch.float64 and not notes

    def test_an_object_that_can_be_called(self, tmp_path: Path) -> None:
        class Served:
            def __call__(self, ids: Any) -> Any:
                return ids

        with pytest.raises(OptionError, match="'ids' is missing; 'idx' is unknown"):
            fitted(saved(tmp_path / "a.safetensors", idx=IDS), Takes.of(Served()))

    def test_one_that_takes_anything(self, tmp_path: Path) -> None:
        class Any_(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return args, kwargs

        save_file({"0": IDS, "x": MASK}, tmp_path / "a.safetensors")
        batch, _ = fitted(tmp_path / "a.safetensors", Takes.of(Any_()))
        assert torch.equal(batch.args[0], IDS) and torch.equal(batch.kwargs["x"], MASK)

    def test_a_slip_of_the_pen_is_no_keyword(self, tmp_path: Path) -> None:
        class Lenient(nn.Module):
            def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
                return input_ids

        with pytest.raises(OptionError, match=r"'input_idz' is unknown \(did you mean 'input_ids'"):
            fitted(saved(tmp_path / "a.safetensors", input_idz=IDS), Takes.of(Lenient()))
        path = saved(tmp_path / "b.safetensors", input_ids=IDS, other=MASK)
        batch, notes = fitted(path, Takes.of(Lenient()))
        assert sorted(batch.kwargs) == ["input_ids", "other"]
        assert "**kwargs takes it" in notes[0]
