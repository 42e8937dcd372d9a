"""The package as a whole: its public names, what importing it costs, how it is laid out."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import tensortap as tap

ROOT = Path(tap.__file__).parent
LAYERS = [
    "errors",
    "numerics",
    "recording",
    "selection",
    "taps",
    "targets",
    "monitoring",
    "comparing",
    "reporting",
    "cli",
]

# Results know how to show themselves, inside functions: the only arrows that point back.
RENDER_THEMSELVES = {
    "comparing/results.py",
    "comparing/weights/results.py",
    "comparing/modes.py",
    "comparing/blame/results.py",
    "comparing/replay/results.py",
    "targets/modes/results.py",
}


# A recording against another is judged while it is made: `record` hands the judge in.
JUDGED_WHILE_RECORDING = {"taps/session.py"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_public_names_are_sorted_and_all_there() -> None:
    assert tap.__all__ == sorted(tap.__all__)
    assert set(tap._HOMES) == set(tap.__all__)
    for name in tap.__all__:
        assert getattr(tap, name) is not None
    assert {"record", "open", "check", "summarize", "TapError", "Target"} <= set(tap.__all__)


def test_importing_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'matplotlib', 'rich', 'typer', 'safetensors'}"
    assert run(f"import sys, tensortap; print({heavy} & set(sys.modules))") == "set()\n"


def test_recording_and_opening_load_no_terminal_or_plot_library() -> None:
    code = """
import sys, tempfile, torch, tensortap as tap
before = set(sys.modules)
model = torch.nn.Linear(2, 2)
with tap.record(model, tempfile.mkdtemp() + "/r", layers="all"):
    model(torch.ones(1, 2))
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(loaded & {"matplotlib", "rich", "typer", "transformers", "pydantic"})
"""
    assert run(code) == "set()\n"


def test_help_takes_under_half_a_second() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "tensortap", "--help"], capture_output=True, check=True
        )
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5


def test_no_module_is_over_800_lines() -> None:
    long = {
        path.name: count
        for path in ROOT.rglob("*")
        if path.suffix in {".py", ".cpp", ".hpp"}
        and (count := len(path.read_text().splitlines())) > 800
    }
    assert not long


def imported_layers(path: Path) -> set[str]:
    """The layers of this package that a module imports, also inside functions."""
    inside = path.relative_to(ROOT).parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = (node.module or "").split(".") if node.module else []
        if node.level:
            parts = [*inside[: len(inside) - node.level], *parts]
        elif parts[:1] == ["tensortap"]:
            parts = parts[1:]
        else:
            continue
        names = [parts[0]] if parts else [alias.name for alias in node.names]
        found.update(name for name in names if name in LAYERS)
    return found


def test_dependencies_point_one_way() -> None:
    """target -> tap -> recording -> report, arithmetic below; see ARCHITECTURE.md."""
    for path in ROOT.rglob("*.py"):
        home = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if home not in LAYERS:
            continue
        later = {
            layer for layer in imported_layers(path) if LAYERS.index(layer) > LAYERS.index(home)
        }
        if path.relative_to(ROOT).as_posix() in RENDER_THEMSELVES:
            later -= {"reporting"}
        if path.relative_to(ROOT).as_posix() in JUDGED_WHILE_RECORDING:
            later -= {"comparing"}
        assert not later, f"{path.relative_to(ROOT)} imports {later}"
