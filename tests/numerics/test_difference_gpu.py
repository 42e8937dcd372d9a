"""Differences on a CUDA device; skipped without one."""

from __future__ import annotations

import math

import pytest
import torch
from difference_definitions import DTYPES, Definition
from test_difference_values import bounded
from test_summary_values import noise

from tensortap.numerics.backend import pick_pair
from tensortap.numerics.difference import difference, difference_of
from tensortap.numerics.profile import profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_device_changes_no_number(dtype: torch.dtype) -> None:
    """On the device, from either side of it, and against itself."""
    one, two = bounded(noise(2000, dtype, seed=1)), bounded(noise(2000, dtype, seed=2))
    definition, same = Definition([(one, two)]), Definition([(one, one)])
    for left, right in ((one.cuda(), two.cuda()), (one, two.cuda()), (one.cuda(), two)):
        assert pick_pair(left, right).name == "reference"
        definition.check(difference(left, right))
    same.check(difference(one.cuda(), one))


def test_profiles_and_streams() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 30, 20, generator=generator)
    y = (x + 0.01 * torch.randn(40, 30, 20, generator=generator)).bfloat16()
    y[3, 4, 5] = math.nan
    found, expected = profile(x.cuda(), y.cuda()), profile(x, y)
    assert found is not None and expected is not None
    assert found.tokens == pytest.approx(expected.tokens, rel=1e-9)
    assert found.channels == pytest.approx(expected.channels, rel=1e-9)
    stream = [(x[:7], y[:7]), (x[7:].cuda(), y[7:].cuda())]
    whole, parts = difference(x, y), difference_of(stream)
    assert parts.percentiles == whole.percentiles
    assert parts.mse == pytest.approx(whole.mse, rel=1e-9)
    assert parts.cosine_distance == pytest.approx(whole.cosine_distance, rel=1e-9)
