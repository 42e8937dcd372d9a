"""Post-dominators: where all ways from a node to the end of a graph come together.

In a graph without names of modules, what the layers of a block make is known, and what the block
itself returns is where everything that they make has come together first. That is a good guess and
no more: a block whose result is read along two ways, or that ends in an op without weights, is seen
too late or too early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["END", "nearest_common", "post_dominators"]

END = -1


def post_dominators(readers: Mapping[int, Sequence[int]], count: int) -> list[int]:
    """For each of `count` nodes in topological order, its nearest post-dominator.

    `readers` are the nodes that read what a node makes; `END` among them stands for the graph's own
    result. A node that nothing reads leads nowhere: it does not hold up others, and has END.
    """
    useful = [False] * count
    for node in range(count - 1, -1, -1):
        useful[node] = any(after == END or useful[after] for after in readers.get(node, ()))
    nearest = [END] * count
    depth = [0] * count
    for node in range(count - 1, -1, -1):
        ways = [after for after in readers.get(node, ()) if after == END or useful[after]]
        if not ways:
            continue
        meet = ways[0]
        for way in ways[1:]:
            meet = _meet(meet, way, nearest, depth)
        nearest[node] = meet
        depth[node] = 1 + (0 if meet == END else depth[meet])
    return nearest


def nearest_common(nodes: Sequence[int], nearest: Sequence[int]) -> int:
    """The first node that is on every way from any of these to the end; one of them may be it."""
    depth = [0] * len(nearest)
    for node in range(len(nearest) - 1, -1, -1):
        after = nearest[node]
        depth[node] = 1 + (0 if after == END else depth[after])
    meet = nodes[0]
    for node in nodes[1:]:
        meet = _meet(meet, node, nearest, depth)
    return meet


def _meet(left: int, right: int, nearest: Sequence[int], depth: Sequence[int]) -> int:
    while left != right:
        if left == END or right == END:
            return END
        if depth[left] >= depth[right]:
            left = nearest[left]
        else:
            right = nearest[right]
    return left
