"""Being told of CUDA graphs, where there is no CUDA: a class with the same three methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tensortap.taps import replays


class Graph:
    def __init__(self) -> None:
        self.done: list[str] = []

    def capture_begin(self, pool: Any = None, *, mode: str = "global") -> None:
        self.done.append(f"begin {mode}")

    def capture_end(self) -> None:
        self.done.append("end")

    def replay(self) -> str:
        self.done.append("replay")
        return "replayed"


class Onlooker:
    def begins(self, graph: Graph) -> None:
        graph.done.append("told of the beginning")

    def ends(self, graph: Graph) -> None:
        graph.done.append("told of the end")

    def replayed(self, graph: Graph) -> None:
        graph.done.append("told of a replay")


@pytest.fixture
def wrapped() -> Iterator[type[Graph]]:
    replays._wrap(Graph)
    yield Graph
    replays._unwrap(Graph)


def test_an_onlooker_is_told_before_a_capture_and_behind_a_replay(
    wrapped: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "_ONLOOKERS", [Onlooker()])
    graph = wrapped()
    graph.capture_begin(mode="relaxed")
    graph.capture_end()
    assert graph.replay() == "replayed"
    assert graph.done == [
        "told of the beginning",
        "begin relaxed",
        "told of the end",
        "end",
        "replay",
        "told of a replay",
    ]


def test_nothing_is_left_behind() -> None:
    before = dict(Graph.__dict__)
    replays._wrap(Graph)
    assert Graph.replay is not before["replay"]
    kept = Graph().replay  # somebody holds on to ours
    replays._unwrap(Graph)
    assert {name: Graph.__dict__[name] for name in before} == before
    assert kept() == "replayed"


def test_who_wrapped_it_after_us_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "replay", Graph.replay)  # what was there comes back at the end
    replays._wrap(Graph)
    ours = Graph.replay

    def theirs(graph: Graph) -> str:
        return f"{ours(graph)}, twice wrapped"

    Graph.replay = theirs  # type: ignore[method-assign]
    replays._unwrap(Graph)
    assert Graph.replay is theirs
    assert Graph().replay() == "replayed, twice wrapped"


def test_a_replay_is_told_once_whoever_wrapped_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "replay", Graph.replay)
    monkeypatch.setattr(replays, "_ONLOOKERS", [Onlooker()])
    replays._wrap(Graph)
    ours = Graph.replay
    Graph.replay = lambda graph: ours(graph)  # type: ignore[method-assign]
    replays._unwrap(Graph)
    between = Graph()
    between.replay()
    assert between.done == ["replay"]
    replays._wrap(Graph)
    graph = Graph()
    graph.replay()
    replays._unwrap(Graph)
    assert graph.done == ["replay", "told of a replay"]
