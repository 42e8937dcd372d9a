"""`python -m tensortap` is the command line."""

from __future__ import annotations

from .cli.main import main

main()
