"""docs/from-the-documents.md names every script of the recipes, and only options that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "from-the-documents.md").read_text()
REFERENCE = (ROOT / "docs" / "commands.md").read_text()
OURS = {"recipe.py", "target.py"}  # no script of a document
FROM_DOCUMENTS = ("minimax_m2", "quamba")
SCRIPTS = sorted(
    path.name
    for folder in FROM_DOCUMENTS
    for path in (ROOT / "recipes" / folder).glob("*")
    if path.is_file() and path.name not in OURS and (path.suffix in (".py", ".sh", ""))
    if not path.name.startswith(".")
)
COMMANDS = sorted(set(re.findall(r"`(tensortap [a-z]+[^`]*)`", PAGE)))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_its_row(script: str) -> None:
    assert script in PAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_ours_has_these_options(command: str) -> None:
    verb = command.split()[1]
    start = REFERENCE.index(f"## {verb}\n")
    section = REFERENCE[start : REFERENCE.find("\n## ", start + 1)]
    for flag in re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", command):
        assert re.search(rf"`[^`]*{flag}\b[^`]*`", section), (flag, verb)


def test_there_is_something_to_look_at() -> None:
    assert {"QUICK_RUN.sh", "comparewithfp", "test_layer_by_layer.py"} <= set(SCRIPTS)
    assert len(COMMANDS) > 20
