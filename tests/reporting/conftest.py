"""A browser for all tests of pages, and how a result is opened in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import chromium
import pytest


class Shown(Protocol):
    """A result that can be a page."""

    def to_html(self, path: Path) -> str: ...


@pytest.fixture(scope="session")
def running() -> Iterator[chromium.Chromium]:
    executable = chromium.find()
    if executable is None:
        reason = "no Chromium on this machine (apt-get install chromium)"
        if os.environ.get(chromium.REQUIRED) == "1":
            pytest.fail(f"{chromium.REQUIRED}=1, but there is {reason}")
        pytest.skip(reason)
    with chromium.browser(executable) as browser:
        yield browser


@pytest.fixture
def show(running: chromium.Chromium, tmp_path: Path) -> Iterator[Callable[..., chromium.Page]]:
    """Open a result's page; afterwards it must have asked for nothing and said nothing."""
    opened = []

    def open_page(result: Shown, width: int = 1400, dark: bool = False) -> chromium.Page:
        path = tmp_path / f"page{len(opened)}.html"
        result.to_html(path)
        page = running.page()
        page.look(width, 900, dark=dark)
        page.open(path)
        opened.append((page, path))
        return page

    yield open_page
    for page, path in opened:
        page.settle()
        assert page.complaints == []
        assert page.requests == [path.resolve().as_uri()]
