"""Copies and digests, with the core and without it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.numerics import memory
from tensortap.numerics.native import core

MEGABYTE = 1 << 20


@pytest.fixture(params=["core", "fallback"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fallback":
        monkeypatch.setattr(memory, "core", None)
    elif core is None:
        pytest.skip("the core is not built")
    return str(request.param)


def buffer(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)


def digest(tensor: torch.Tensor) -> bytes:
    tensor = tensor.contiguous()
    return memory.digest(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@pytest.mark.parametrize(
    "n", [0, 1, 7, 63, 64, 65, 4096, MEGABYTE, MEGABYTE + 1, 9 * MEGABYTE + 13]
)
def test_copies_are_exact_and_stay_inside(way: str, n: int) -> None:
    source = buffer(n + 3)[3:]  # off any alignment
    for threads in (1, 2):
        for fused in (False, True):
            target = torch.full((n + 64,), 0xAB, dtype=torch.uint8)
            place = target[32:].data_ptr()
            if fused:
                got = memory.copy_digest(place, source.data_ptr(), n, threads)
                assert got == memory.digest(source.data_ptr(), n, 1) and len(got) == 16
            else:
                memory.copy_into(place, source.data_ptr(), n, threads)
            assert torch.equal(target[32 : 32 + n], source)
            assert (target[:32] == 0xAB).all() and (target[32 + n :] == 0xAB).all()


def test_a_digest_knows_length_and_order(way: str) -> None:
    zeros = torch.zeros(300, dtype=torch.uint8)
    lengths = [memory.digest(zeros.data_ptr(), n) for n in range(301)]
    assert len(set(lengths)) == 301
    data = buffer(4096, seed=1)
    rotations = {digest(data.roll(k)) for k in range(0, 4096, 8)}
    assert len(rotations) == 512
    big = torch.zeros(3 * MEGABYTE, dtype=torch.uint8)
    big[:MEGABYTE] = 1
    assert digest(big) != digest(big.roll(MEGABYTE)) != digest(big.roll(2 * MEGABYTE))


def test_any_flipped_bit_shows(way: str) -> None:
    data = buffer(640, seed=2)
    seen = {digest(data)}
    for bit in range(8 * 640):
        changed = data.clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        seen.add(digest(changed))
    assert len(seen) == 1 + 8 * 640


def test_flipped_signs_do_not_cancel(way: str) -> None:
    """Pairs of flipped sign bits: the differences that simple multiplicative hashes lose."""
    data = torch.randn(256, generator=torch.Generator().manual_seed(3))
    seen = {digest(data)}
    pairs = [(i, j) for i in range(0, 256, 3) for j in range(i + 1, 256, 5)]
    for i, j in pairs:
        changed = data.clone()
        changed[i] *= -1
        changed[j] *= -1
        seen.add(digest(changed))
    assert len(seen) == 1 + len(pairs)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.binary(min_size=1, max_size=400), seed=st.integers(0, 1 << 30))
def test_equal_content_has_equal_digests_and_permuted_has_not(data: bytes, seed: int) -> None:
    first = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    shuffled = list(data)
    random.Random(seed).shuffle(shuffled)
    second = torch.tensor(shuffled, dtype=torch.uint8)
    assert digest(first.clone()) == digest(first)
    assert (digest(first) == digest(second)) == (bytes(shuffled) == data)


@pytest.mark.parametrize("compiled", [True, False])
def test_many_digests_are_those_of_each(monkeypatch, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(memory, "core", None)
    torch.manual_seed(0)
    xs = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (0, 1, 63, 64, 1000, 400_000)]
    where = [(x.data_ptr(), x.numel()) for x in xs]
    assert memory.digest_many(where, 2) == [memory.digest(*stretch) for stretch in where]
    assert memory.digest_many([]) == []
