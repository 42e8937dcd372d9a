"""A pytest plugin: the fixture `tap_snapshot` keeps a recording beside the test and compares.

    def test_model(tap_snapshot):
        tap_snapshot(model, x)  # records the blocks and compares them with the snapshot

A snapshot is a recording in `__snapshots__/TEST_FILE/TEST_NAME/`. The first run writes it and
fails; `--tap-update` rewrites those that no longer match. Nothing here imports torch until a test
uses the fixture.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .recording.reader import Recording

__all__ = ["TapSnapshot", "tap_snapshot"]

FOLDER = "__snapshots__"
_LONGEST = 100
_WRITTEN = pytest.StashKey[list[str]]()
_PROPERTY = "tap_snapshot"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("tensortap").addoption(
        "--tap-update",
        action="store_true",
        default=False,
        help="Rewrite the tensortap snapshots that do not match.",
    )


@pytest.fixture
def tap_snapshot(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TapSnapshot:
    """Compare a model's layers, a recording or tensors with the snapshot beside the test."""
    request.node.stash[_WRITTEN] = []
    update = bool(request.config.getoption("--tap-update"))
    return TapSnapshot(request.node, tmp_path_factory, update=update)


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """A test that wrote a first snapshot fails, but when it is through, so that it writes all."""
    written = item.stash.get(_WRITTEN, [])
    if written:
        word = "snapshot" if len(written) == 1 else "snapshots"
        pytest.fail(
            f"There was nothing to compare with yet: wrote the {word} {', '.join(written)}. "
            "Look at it (tensortap show), keep it with the test, and run the test again.",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which snapshots were written; reports carry it here from workers too."""
    told = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in getattr(report, "user_properties", ())
        if name == _PROPERTY
    ]
    for line in told:
        terminalreporter.write_line(f"tensortap: {line}")


class TapSnapshot:
    """The snapshots of one test. Call it once a snapshot."""

    def __init__(self, item: pytest.Item, scratch: pytest.TempPathFactory, *, update: bool) -> None:
        self._item = item
        self._scratch = scratch
        self._update = update
        self._names: set[str] = set()
        self.folder = item.path.parent / FOLDER / item.path.stem / _test_name(item)

    def __call__(
        self,
        subject: Any,
        *inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        layers: str | list[str] = "blocks",
        **options: Any,
    ) -> None:
        """Compare with the snapshot; write it where there is none.

        Args:
            subject: a model, which is run on `inputs` and `kwargs` and recorded; or a recording or
                its path; or tensors, also in dicts and lists.
            name: the snapshot's name, when a test has several and wants to name them; by default
                they are numbered in the order of the calls.
            layers: which layers of a model to record.
            options: those of `tap.compare`; for tensors those of `tap.testing.assert_matches`.
        """
        __tracebackhide__ = True
        from .recording.schema import MANIFEST

        place = self._place(name)
        made = self._make(subject, inputs, dict(kwargs or {}), layers)
        if not (place / MANIFEST).exists():
            self._write(made, place, "wrote")
            if not self._update:
                self._item.stash[_WRITTEN].append(_shown(place))
            return
        failure = self._failure(place, made, options)
        if failure is None:
            return
        if self._update:
            self._write(made, place, "rewrote")
            return
        raise AssertionError(
            f"{failure}\n\nIf the change is meant, rewrite the snapshot with --tap-update."
        )

    def _failure(self, place: Path, made: Recording, options: dict[str, Any]) -> str | None:
        """Why the snapshot does not match; one that cannot even be compared is rewritten too."""
        from .errors import ComparisonError, RecordingError

        try:
            return _failure(place, made, options)
        except (ComparisonError, RecordingError) as error:
            if self._update:
                return str(error)
            raise

    def _place(self, name: str | None) -> Path:
        from .errors import OptionError

        if name is None:
            name = next(n for k in range(10**6) if (n := str(k)) not in self._names)
        if name in self._names:
            raise OptionError(
                f"This test has a snapshot {name!r} already. Give each a name of its own."
            )
        self._names.add(name)
        return self.folder / safe_name(name)

    def _make(
        self,
        subject: Any,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        layers: str | list[str],
    ) -> Recording:
        """A recording of whatever was given."""
        from torch import nn

        from .errors import OptionError
        from .recording.reader import Recording
        from .recording.reader import open as open_recording

        path = self._scratch.mktemp("tap_snapshot")
        if isinstance(subject, nn.Module):
            return _record(subject, path, inputs, kwargs, layers)
        if inputs or kwargs:
            raise OptionError(
                f"Only a model takes inputs, and {type(subject).__name__} is none that can be "
                "recorded. Pass a torch.nn.Module, or a recording or tensors alone."
            )
        if isinstance(subject, Recording):
            return subject
        if isinstance(subject, str | os.PathLike):
            return open_recording(subject)
        return _keep_tensors(subject, path)

    def _write(self, made: Recording, place: Path, word: str) -> None:
        """Copy a recording to its place; what was there goes when the new one is whole."""
        from .recording.schema import MANIFEST

        fresh = place.with_name(f".{place.name}.{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        store = made._store
        for name in (MANIFEST, *(segment.name for segment in made._segments)):
            (fresh / name).write_bytes(store.view(name, 0, store.size(name)))
        shutil.rmtree(place, ignore_errors=True)
        fresh.replace(place)
        self._item.user_properties.append((_PROPERTY, f"{word} {_shown(place)}"))


def _record(
    model: Any, path: Path, inputs: tuple[Any, ...], kwargs: dict[str, Any], layers: Any
) -> Recording:
    import torch

    from .recording.reader import open as open_recording
    from .taps import record

    recorder = record(model, path, layers=layers, inputs=True, strict=True)
    with torch.no_grad(), recorder:
        model(*inputs, **kwargs)
    return open_recording(path)


def _keep_tensors(value: Any, path: Path) -> Recording:
    """Tensors as a recording: one layer, a leaf each."""
    import torch

    from . import __version__
    from .errors import OptionError
    from .recording.reader import open as open_recording
    from .recording.schema import Manifest, Row
    from .recording.writer import Writer, now
    from .testing import leaves_of

    leaves = leaves_of(value)
    if not leaves:
        raise OptionError(
            f"A snapshot is of a model, a recording or tensors, got {type(value).__name__}."
        )
    tool = f"tensortap {__version__}"
    writer = Writer(str(path), Manifest(tool=tool, torch=torch.__version__, created=now()))
    for order, (leaf, tensor) in enumerate(leaves.items()):
        row = Row(layer=_TENSORS, port="output", leaf=leaf, type="", order=order)
        writer.add(row, tensor.detach().cpu())
    writer.close()
    return open_recording(path)


_TENSORS = "tensors"


def _failure(place: Path, made: Recording, options: dict[str, Any]) -> str | None:
    from .comparing.compare import compare
    from .recording.reader import open as open_recording
    from .testing import run_failure, tensor_failure

    kept, title = open_recording(place), f"The snapshot {_shown(place)} does not match."
    if made.layers == kept.layers == [_TENSORS]:
        old, new = (
            {record.leaf: record.tensor() for record in run[_TENSORS].records}
            for run in (kept, made)
        )
        failure = tensor_failure(old, new, **options)
        return None if failure is None else f"{title} {failure}"
    return run_failure(compare(kept, made, **options), complete=True, title=title)


def _shown(place: Path) -> str:
    """A path as short as it can be said."""
    try:
        return str(place.relative_to(Path.cwd()))
    except ValueError:
        return str(place)


def _test_name(item: pytest.Item) -> str:
    """The test's own part of its node id as one folder's name."""
    _, _, rest = item.nodeid.partition("::")
    return safe_name((rest or item.name).replace("::", "."))


def safe_name(name: str) -> str:
    """A file name for any test id: readable, and told apart by a digest where letters were lost."""
    plain = re.sub(r"\[(.*)\]$", r"-\1", name, flags=re.DOTALL)
    safe = re.sub(r"[^A-Za-z0-9_.=+-]", "_", plain)[:_LONGEST].strip(".")
    if safe != plain or not safe:
        safe = f"{safe}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}".lstrip("-")
    return safe
