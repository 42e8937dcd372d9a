"""Metrics that others add."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tensortap as tap
from support import Net
from tensortap.comparing import metrics
from tensortap.errors import OptionError


@pytest.fixture(autouse=True)
def psnr() -> Iterator[None]:
    def measure(reference: torch.Tensor, candidate: torch.Tensor) -> float:
        error = (candidate.double() - reference.double()).square().mean()
        return float(10 * torch.log10(reference.double().abs().max() ** 2 / error))

    tap.register_metric("psnr", measure)
    yield
    metrics._registered.clear()


def test_a_rule_may_name_an_added_metric(
    net: Net, ids: Any, recorded: Callable[..., tap.Recording]
) -> None:
    left, right = recorded(net, ids), recorded(net.double(), ids)
    assert tap.compare(left, right, rules=[".*: psnr > 100"]).same
    strict = tap.compare(left, right, rules=[".*: psnr > 1000"])
    assert strict.first_divergence is not None
    assert "psnr > 1000 does not hold (got 1" in strict.first_divergence.why
    with pytest.raises(OptionError, match="psnr"):
        tap.compare(left, right, rules=[".*: ssim > 1"])


def test_it_is_shown_where_it_was_asked_for(
    net: Net, ids: Any, recorded: Callable[..., tap.Recording]
) -> None:
    left, right = recorded(net, ids), recorded(net.double(), ids)
    row = tap.compare(left, right, metrics=["psnr"])["head"]
    ((name, value),) = row.parts[0].added
    assert name == "psnr"
    assert 100 < value < 200
    assert row.to_dict()["parts"][0]["added"] == {"psnr": value}
    with pytest.raises(OptionError, match="no metric 'ssim' to add"):
        tap.compare(left, right, metrics=["ssim"])


def test_names_and_failures_are_said(
    net: Net, ids: Any, recorded: Callable[..., tap.Recording]
) -> None:
    with pytest.raises(OptionError, match="There is a metric 'mse' already"):
        tap.register_metric("mse", lambda a, b: 0.0)
    with pytest.raises(OptionError, match="one word"):
        tap.register_metric("my metric", lambda a, b: 0.0)
    tap.register_metric("broken", lambda a, b: 1 / 0)
    left = recorded(net, ids)
    with pytest.raises(OptionError, match="'broken' failed on tensors of shape"):
        tap.compare(left, left, metrics=["broken"])
