"""The command line, run in this process: fast, and with its exit code and both streams."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Result, Run

from tensortap.cli.main import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Result(int(caught.value.code or 0), out, err)

    return call


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the demo: embedding, blocks, final norm, inputs, two batches."""
    path = tmp_path_factory.mktemp("demo") / "run"
    words = ["embedding", "blocks", "final_norm"]
    layers = [part for word in words for part in ("--layers", word)]
    arguments = ["record", "tensortap.demo:build", "-o", str(path), *layers, "--inputs"]
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--samples", "2", "--seq-len", "12"])
    assert not caught.value.code
    return path


@pytest.fixture(scope="session")
def modes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of recordings: the demo in fp32, bf16, with its bug, and fp32 of other inputs."""
    folder = tmp_path_factory.mktemp("modes")
    layers = [part for word in ("embedding", "blocks") for part in ("--layers", word)]
    runs = {mode: ("--mode", mode) for mode in ("fp32", "bf16", "bug")}
    runs["other"] = ("--mode", "fp32", "--seed", "1")
    for name, options in runs.items():
        arguments = ["record", "tensortap.demo:build", "-o", str(folder / name), *layers]
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--inputs", "--seq-len", "12", *options])
        assert not caught.value.code
    return folder
