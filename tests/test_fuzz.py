"""Lying, damaged and special files over every reader: a sentence of ours, or a right answer.

The suite runs a few hundred cases from fixed seeds; TENSORTAP_FUZZ=20 runs twenty times as many.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.cli.main import main

TIMES = int(os.environ.get("TENSORTAP_FUZZ", "1"))
SEED = int(os.environ.get("TENSORTAP_FUZZ_SEED", "0"))
SECONDS = 10  # that one case may take; a hang takes for ever
MANIFEST, SEGMENT, LIVE = "recording.json", "segment-r000-000000.safetensors", "live.json"
WRONG: tuple[Any, ...] = (
    *(None, True, False, "", [], {}, [[]], {"a": 1}, 0, 1, -1, 1.5, "0", "float32", "qint8"),
    *(2**31, 2**53, 2**60, 2**63, 2**64, -(2**63), 10**400, 1e308),
    *(float("inf"), float("-inf"), float("nan")),
    *("a" * 5000, "a" * 300_000, "../../etc/passwd", "\x1b[31m", "\u202e", "\ud800", "\x00", "F4"),
    *([1] * 70, [2**31] * 3, [2**62, 0], ["\udfff"], {"\ud800": 1}, SEGMENT, "n" * 255 + "é"),
)


class Late(BaseException):
    """A case took too long."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Tanh()
        self.c = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of each kind, and a comparison beside one."""
    root = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 6)
    kinds: dict[str, dict[str, Any]] = {
        "tensors": {"grads": True},
        "histograms": {"histograms": True},
        "sketch": {"keep": "sketch"},
        "against": {"against": str(root / "tensors")},
    }
    for name, options in kinds.items():
        with tap.record(model, root / name, layers="all", inputs=True, **options) as recorder:
            for step in range(2):
                model(x + step).sum().backward()
                recorder.step()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with tap.watch(model, root / "watched", layers="all", every=1) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            watch.log(loss=loss)
            optimizer.step()
    _tell_of_generation(root / "against" / MANIFEST)
    return root


def _tell_of_generation(path: Path) -> None:
    """A manifest with the parts that only a language model's has."""
    data = json.loads(path.read_text())
    data["generations"] = [
        {
            "epoch": 0,
            "batch": 0,
            "before": 0,
            "steps": 2,
            "sampled": False,
            "beams": 1,
            "prompt": [[1, 2]],
            "prompt_length": 2,
            "tokens": [[3, 4]],
            "text": ["cd"],
            "pieces": [["c", "d"]],
        }
    ]
    data["self_checks"] = [
        {
            "layer": "a",
            "check": "output",
            "passed": True,
            "text": "fine",
            "largest": 0.0,
            "allowed": 1e-6,
        }
    ]
    data["skipped"] = [
        {"layer": "b", "port": "output", "leaf": "", "reason": "it is sparse", "count": 2}
    ]
    path.write_text(json.dumps(data))


class Judge:
    """Runs every reader over a damaged recording and collects what must not come out."""

    def __init__(self, good: Path, place: Path) -> None:
        self.good, self.place = good, place
        self.run = place / "run"
        self.bad: list[str] = []
        self.cases = 0

    def copy(self, kind: str) -> Path:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.good / kind, self.run, symlinks=True)
        return self.run

    def look(self, label: object, kind: str) -> None:
        """Everything that reads, over the damaged recording; the commands only now and then."""
        self.cases += 1
        acts = list(self._python(kind))
        if self.cases % 8 == 0:
            acts += list(self._commands(kind))
        for what, act in acts:
            self._guarded(f"{label}: {what}", act)

    def _guarded(self, label: str, act: Callable[[], object]) -> None:
        def late(*_: object) -> None:
            raise Late

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        try:
            act()
        except tap.TapError as error:
            text = str(error)
            if len(text) > 20_000 or not text.strip():
                self.bad.append(f"{label}: a message of {len(text)} letters")
        except Late:
            self.bad.append(f"{label}: more than {SECONDS} s")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{type(error).__name__}: {str(error)[:100]}"
            self.bad.append(f"{label}: {name} ({where.filename}:{where.lineno})")
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def _python(self, kind: str) -> Iterator[tuple[str, Callable[[], object]]]:
        good, path = self.good / kind, self.run
        yield "whole", lambda: tap.open(path).records
        found: list[tap.Recording] = []
        yield "open", lambda: found.append(tap.open(path, partial=True))
        yield "read", lambda: [self._all_of(run) for run in found]
        yield "check", lambda: [run.check() for run in found]
        if self.cases % 4 == 0:
            yield "compare", lambda: tap.compare(good, path, partial=True).to_json()
        if self.cases % 4 == 2:
            yield "compare it", lambda: tap.compare(path, good, partial=True).to_json()

    def _all_of(self, run: tap.Recording) -> None:
        repr(run), run.notes, run.steps, run.nbytes, run._repr_html_(), run.to_dict()
        for record in run.records[:30]:
            with contextlib.suppress(tap.TapError):
                record.to_dict(), record.sketch, record.file
            if record.stored:
                with contextlib.suppress(tap.TapError):
                    record.tensor().sum()

    def _commands(self, kind: str) -> Iterator[tuple[str, Callable[[], object]]]:
        run, good, out = str(self.run), str(self.good / kind), str(self.place / "out")
        for words in (
            ["show", "--partial", run],
            ["show", "--partial", "--json", run],
            ["show", "--partial", run, "a"],
            ["show", "--follow", "--timeout", "0", "--json", run],
            ["check", "--partial", run],
            ["compare", "--partial", good, run],
            ["export", "--partial", run, "--layout", "pt", "-o", out],
            ["export", "--partial", run, "--layout", "npy", "-o", out],
            ["export", "--partial", run, "--layout", "npz", "-o", f"{out}/all.npz"],
        ):
            if words[:2] == ["show", "--follow"] and not _is_over(self.run):
                continue
            yield " ".join(words[:2]), lambda words=words: self._command(words)  # type: ignore[misc]
        if self.cases % 16 == 0:
            back = str(self.place / "back")
            words = ["import", out, "--layout", "pt", "-o", back, "--overwrite"]
            yield "import", lambda: self._command(words)

    def _command(self, words: list[str]) -> None:
        out, err = io.StringIO(), io.StringIO()
        code: Any = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(words)
            except SystemExit as end:
                code = end.code
        if code not in (0, 1, 2) or "unexpected" in err.getvalue() or "\x1b" in err.getvalue():
            raise AssertionError(f"exit {code}: {err.getvalue()[:300]}")
        if "--json" in words and code == 0 and "--follow" not in words:
            json.loads(out.getvalue())


def _is_over(run: Path) -> bool:
    """Whether a manifest says that its run is over: `show --follow` waits for one that is not."""
    file = run / MANIFEST
    if not file.is_file() or file.stat().st_size > 1 << 20:
        return True  # which must be refused
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((run / MANIFEST).read_text()).get("status") in ("complete", "failed")
    return False


@pytest.fixture
def judge(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """Afterwards: nothing came out but ours, and the process has not grown."""
    monkeypatch.delenv("TENSORTAP_TRACEBACK", raising=False)
    found = Judge(good, tmp_path)
    before = _peak()
    yield found
    assert not found.bad, "\n".join(found.bad[:20])
    assert _peak() - before < 700 << 20


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _walk(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 4)):
            yield from _walk(value[index], (*path, index))


def _put(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


def _parts(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    document = json.loads(header.pop("__metadata__")["tensortap"])
    return header, document, whole[8 + length :]


def _write(path: Path, header: Any, document: Any, data: bytes) -> None:
    if isinstance(header, dict):
        header = {"__metadata__": {"tensortap": json.dumps(document)}, **header}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _lies(good: Path) -> list[tuple[str, str, tuple[Any, ...], Any]]:
    """Every place of every document, with every wrong value."""
    found = []
    for kind in ("tensors", "histograms", "sketch", "against", "watched"):
        header, document, _ = _parts(good / kind / SEGMENT)
        parts = {"header": header, "document": document}
        parts[MANIFEST] = json.loads((good / kind / MANIFEST).read_text())
        for name in (LIVE, "comparison.json"):
            if (good / kind / name).exists():
                parts[name] = json.loads((good / kind / name).read_text())
        for part, data in parts.items():
            found += [(kind, part, path, wrong) for path in _walk(data) for wrong in WRONG]
    return found


def _tell(run: Path, part: str, path: tuple[Any, ...], wrong: Any) -> None:
    if part.endswith(".json"):
        data = _put(json.loads((run / part).read_text()), path, wrong)
        (run / part).write_text(json.dumps(data))
        return
    header, document, data = _parts(run / SEGMENT)
    if part == "header":
        header = _put(header, path, wrong)
    else:
        document = _put(document, path, wrong)
    _write(run / SEGMENT, header, document, data)


def test_lies(judge: Judge) -> None:
    """Each field of each document, with each wrong kind of value."""
    for kind, part, path, wrong in random.Random(SEED).sample(_lies(judge.good), 100 * TIMES):
        _tell(judge.copy(kind), part, path, wrong)
        judge.look((kind, part, path, ascii(wrong)[:30]), kind)


def test_flipped_bits(judge: Judge) -> None:
    """One or several, mostly in what is read as structure."""
    chance = random.Random(SEED + 1)
    for _ in range(60 * TIMES):
        kind = chance.choice(["tensors", "histograms", "sketch", "against", "watched"])
        file = judge.copy(kind) / chance.choice([SEGMENT, SEGMENT, SEGMENT, MANIFEST])
        data = bytearray(file.read_bytes())
        length = struct.unpack("<Q", data[:8])[0] + 8 if file.name == SEGMENT else len(data)
        spots = []
        for _ in range(chance.choice([1, 1, 2, 20])):
            whole = chance.random() < 0.3
            spots.append(chance.randrange(len(data) if whole else min(length, len(data))))
            data[spots[-1]] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        judge.look((kind, file.name, spots[:3]), kind)


def test_truncations(judge: Judge) -> None:
    """A file that ends too early is damaged, or was whole before its last bytes."""
    chance = random.Random(SEED + 2)
    for _ in range(30 * TIMES):
        kind, name = chance.choice(["tensors", "watched"]), chance.choice([SEGMENT, MANIFEST])
        file = judge.copy(kind) / name
        data = file.read_bytes()
        at = chance.randrange(len(data) - 1)
        file.write_bytes(data[:at])
        judge.look((kind, name, at), kind)
        if name == SEGMENT:
            with pytest.raises(tap.TapError):
                tap.open(judge.run)


def test_a_header_of_another_length_is_noticed(judge: Judge) -> None:
    """One flipped bit in the first bytes: every tensor would be read from another place."""
    for bit in range(64):
        file = judge.copy("tensors") / SEGMENT
        data = bytearray(file.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        with pytest.raises(tap.TapError):
            tap.open(judge.run)


def _fifo(path: Path, root: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, tempfile.TemporaryDirectory() as short:
        made.bind(f"{short}/s")
        os.link(f"{short}/s", path)


def _circle(path: Path, root: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path, root: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path, root: Path) -> None:
    path.mkdir()


def _nowhere(path: Path, root: Path) -> None:
    path.symlink_to(root / "nothing")


def _huge(path: Path, root: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


SPECIAL = (_fifo, _socket, _circle, _device, _folder, _nowhere, _huge)


@pytest.mark.parametrize("name", [MANIFEST, SEGMENT, LIVE, "comparison.json"])
@pytest.mark.parametrize("make", SPECIAL, ids=lambda make: make.__name__.strip("_"))
def test_special_files(judge: Judge, make: Callable[[Path, Path], None], name: str) -> None:
    """Neither a FIFO nor a device nor a link to itself is waited for, or read without end."""
    kind = "against" if name == "comparison.json" else "watched"
    file = judge.copy(kind) / name
    file.unlink(missing_ok=True)
    make(file, judge.place)
    judge.cases = 7  # with every command
    judge.look(make.__name__, kind)
    if name in (MANIFEST, SEGMENT):
        with pytest.raises(tap.TapError, match=name.partition(".")[0]):
            tap.open(judge.run)
