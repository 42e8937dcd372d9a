"""Writes docs/commands.md from the commands themselves (`make pictures`); a test compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.main import get_command

from tensortap.cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"

HEAD = """# Commands

Made by `make pictures` from the commands themselves. Every command takes `--json` (data on \
stdout; notes and progress always go to stderr) and `--help`, respects `NO_COLOR`, and exits with \
0 when it is done, 1 when the answer is "unhealthy" (`check`, `show --follow`) or "these differ" \
(`compare`), and 2 when there is trouble, which it says in a sentence.
"""


def page() -> str:
    root: Any = get_command(app)
    return HEAD + "".join(_section(name, command) for name, command in root.commands.items())


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["tensortap", name, *(_argument(p) for p in arguments)])
    rows = [f"| `{_names(p)}` | {_help(p)} |" for p in options if "--help" not in p.opts]
    table = "\n".join(["| option | |", "|---|---|", *rows])
    text = " ".join((command.help or "").split())
    return f"\n## {name}\n`{usage}`: {text}\n\n{table}\n"


def _argument(parameter: Any) -> str:
    name = parameter.metavar or str(parameter.name).upper()
    name = name.strip("{}[]")
    return name if parameter.required else f"[{name}]"


def _names(parameter: Any) -> str:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    takes_value = not (parameter.is_flag or parameter.count)
    return f"{names} {parameter.metavar or 'VALUE'}" if takes_value else names


def _help(parameter: Any) -> str:
    return " ".join((parameter.help or "").split()).replace("|", "\\|")


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
