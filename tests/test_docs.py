"""Every command in the README and the docs runs, in order, and every page is in step."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from forked_commands import Commands, Ran

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def exit_codes(page: Path) -> list[int]:
    """What each command of a page exits with: 0, unless its comment begins `exit 1`."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
    said = [re.search(r"#\s*exit (\d)", line) for line in lines]
    return [int(match[1]) if match else 0 for match in said]


# The Chinese README shows the same commands, which a test below makes sure of.
RUN = [page for page in PAGES if commands(page) and page.name != "README.zh.md"]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_every_command_runs_as_written(
    page: Path, tmp_path: Path, forked: Commands, shelf: Path
) -> None:
    for words, code in zip(commands(page), exit_codes(page), strict=True):
        assert words[0] == "tensortap", f"{page.name}: {words} is no command of ours"
        if words[1] == "demo":
            ran = run_once(forked, words[1:], shelf, tmp_path)
        else:
            ran = forked.run(words[1:], tmp_path)
        said = f"{page.name}: {shlex.join(words)}\n{ran.stderr}"
        assert ran.code == code, said
        assert ran.stdout.strip(), said


def run_once(forked: Commands, words: list[str], shelf: Path, folder: Path) -> Ran:
    """A demo, which starts from nothing and takes 10 seconds, is run once for all the pages that
    show it, of all workers; each of them gets the files that it left."""
    kept = shelf / hashlib.sha256(shlex.join(words).encode()).hexdigest()
    with (shelf / f"{kept.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = kept / "ran.json"
        if not told.exists():
            (kept / "files").mkdir(parents=True)
            told.write_text(json.dumps(asdict(forked.run(words, kept / "files"))))
    shutil.copytree(kept / "files", folder, dirs_exist_ok=True)
    return Ran(**json.loads(told.read_text()))


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every worker of this run shares."""
    own = tmp_path_factory.getbasetemp()
    path = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shelf"
    path.mkdir(exist_ok=True)
    return path


def test_both_readmes_show_the_same_commands() -> None:
    english, chinese = (ROOT / "README.md", ROOT / "README.zh.md")
    assert commands(english) == commands(chinese)
    table = re.compile(r"\]\((docs/[a-z0-9.-]+|ARCHITECTURE.md)\)")
    assert table.findall(english.read_text()) == table.findall(chinese.read_text())


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_reference_is_made_from_the_commands() -> None:
    """Fails when an option is added or changed and the page is not remade: make pictures."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert (ROOT / "docs" / "commands.md").read_text() == reference.page()


def test_the_python_of_the_format_page_reads_a_recording(tmp_path, monkeypatch) -> None:
    import torch

    import tensortap as tap

    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 3)
    with tap.record(model, "runs/fp32", layers="all"):
        expected = model(torch.ones(1, 2))
    (code,) = blocks(ROOT / "docs" / "format.md", "python")
    names: dict[str, object] = {}
    exec(code, names)
    assert names["layer"] == ""
    assert torch.equal(names["values"], expected)


def test_the_python_page_runs_and_names_every_public_name(tmp_path, monkeypatch) -> None:
    import tensortap as tap

    page = ROOT / "docs" / "python.md"
    for name in tap.__all__:
        assert f"tap.{name}" in page.read_text(), name
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(page, "python")
    exec(code, {})
