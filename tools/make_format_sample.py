"""Makes the small recording that tests keep for ever, to prove that this format stays readable.

python tools/make_format_sample.py tests/recording/data/format-1
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import tensortap as tap


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return x.to(torch.bfloat16), {"mask": x > 0}


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), Pair())
    with tap.record(
        model, sys.argv[1], layers="all", inputs=True, grads=True, histograms=True, mode="sample"
    ) as rec:
        for step in range(2):
            values, _ = model(torch.arange(8.0).view(2, 4) + step)
            values.sum().backward()
            rec.step()


if __name__ == "__main__":
    main()
