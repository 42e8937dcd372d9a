"""Post-dominators of small graphs."""

import random

from tensortap.taps.programs.postdom import END, nearest_common, post_dominators


def test_a_residual_block() -> None:
    #   0 -> 1 -> 2 -> 3(add) -> end, 0 -> 3
    readers = {0: [1, 3], 1: [2], 2: [3], 3: [END]}
    nearest = post_dominators(readers, 4)
    assert nearest == [3, 2, 3, END]
    assert nearest_common([1, 2], nearest) == 2
    assert nearest_common([0, 1], nearest) == 3
    assert nearest_common([3], nearest) == 3


def test_two_results_meet_at_the_end_alone() -> None:
    nearest = post_dominators({0: [1, 2], 1: [END], 2: [END]}, 3)
    assert nearest == [END, END, END]
    assert nearest_common([1, 2], nearest) == END


def test_what_nothing_reads_holds_nobody_up() -> None:
    nearest = post_dominators({0: [1, 2], 1: [3], 2: [END]}, 4)  # 3 leads nowhere
    assert nearest[0] == 2


def test_it_is_what_all_ways_have_in_common() -> None:
    def ways(node: int) -> list[list[int]]:
        if node == END:
            return [[]]
        return [[node, *rest] for after in readers[node] for rest in ways(after)]

    draw = random.Random(0)
    for _ in range(60):
        count = draw.randint(2, 9)
        readers = {
            node: draw.sample([*range(node + 1, count), END], draw.randint(1, min(2, count - node)))
            for node in range(count)
        }
        nearest = post_dominators(readers, count)
        for node in range(count):
            common = set.intersection(*(set(way[1:]) for way in ways(node)))
            assert nearest[node] == (min(common) if common else END)
        pair = draw.sample(range(count), 2)
        shared = set.intersection(*(set(way) for node in pair for way in ways(node)))
        assert nearest_common(pair, nearest) == (min(shared) if shared else END)
