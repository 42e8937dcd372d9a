"""`tensortap demo --export`; that its files record as the model does is the README's test."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tensortap import demo_export
from tensortap.cli.main import main


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0)


def test_what_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_, last = demo_export._WRITERS
    absent = (last[0], ("a_package_that_is_not_there",), last[2])
    monkeypatch.setattr(demo_export, "_WRITERS", (first, absent))
    made, notes = demo_export.export_demo(tmp_path / "models")
    assert made == ["in.safetensors", "traced.pt"]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == sorted(made)
    assert notes == ["model.xml was not written: it needs a_package_that_is_not_there."]
    assert list(load_file(tmp_path / "models" / "in.safetensors")) == ["input_ids"]


def test_a_folder_with_something_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert _run("demo", "--export", "-o", str(tmp_path)) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert _run("demo", "--export", "--train") == 2
