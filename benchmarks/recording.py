"""What recording costs: `python benchmarks/recording.py`, or `make bench`.

For a 12-layer model of hidden size 768 and for a tiny one, every module recorded: a forward with
tensors recorded and with summaries recorded, against the plain forward, the documents' way
(`detach().cpu()` and six statistics a layer), and the floor (the forward, then one copy of the same
bytes into a warm buffer). One run, interleaved, medians of ratios, half a second of rest in between
so that one variant does not pay for writing back another one's file; an A/A row shows the noise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensortap as tap
from tensortap.numerics import memory
from timing import interleave


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        b, t, w = y.shape
        q, k, v = (
            f(y).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, w))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def outputs_of(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    hooks = [m.register_forward_hook(lambda m, a, out: found.append(out)) for m in model.modules()]
    model(ids)
    for hook in hooks:
        hook.remove()
    return found


def documents_way(store: dict[str, Any], name: str) -> Callable[..., None]:
    """Seed 000's hook: a copy to the CPU and six statistics."""

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        kept = out.detach().cpu().clone()
        f = kept.float()
        store[name] = (
            kept,
            {
                "mean": f.mean().item(),
                "std": f.std().item(),
                "min": f.min().item(),
                "max": f.max().item(),
                "has_nan": torch.isnan(f).any().item(),
                "has_inf": torch.isinf(f).any().item(),
            },
        )

    return hook


def measure(
    layers: int, width: int, heads: int, length: int, steps: int, rounds: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model(layers, width, heads).eval()
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (1, length))
    outputs = outputs_of(model, ids)
    nbytes = [t.numel() * t.element_size() for t in outputs]
    warm = torch.zeros(sum(nbytes), dtype=torch.uint8)
    folder = Path(tempfile.mkdtemp(prefix="tensortap-bench-"))
    recorders: dict[str, tap.Recorder] = {}
    opening: dict[str, float] = {}

    def forwards() -> Iterator[torch.Tensor]:
        """Other tokens every time: content that was seen before would not be stored again."""
        for _ in range(steps):
            yield model(torch.randint(0, 1000, (1, length), generator=dice))

    def plain() -> None:
        for _ in forwards():
            pass

    def floor() -> None:
        for _ in forwards():
            at = 0
            for tensor, size in zip(outputs, nbytes, strict=True):
                memory.copy_into(warm.data_ptr() + at, tensor.data_ptr(), size)
                at += size

    def recording(name: str, **options: Any) -> Callable[[], None]:
        """Forwards inside a recording that stays open; hooks come and go with each timing."""
        start = time.perf_counter()
        recorder = tap.record(model, folder / name, layers="all", **options).start()
        assert recorder._sink is not None
        recorder.tap.detach()
        opening[name] = time.perf_counter() - start
        recorders[name] = recorder
        sink, fail = recorder._sink, recorder._fail

        def run() -> None:
            recorder.tap.attach(sink, fail)
            for _ in forwards():
                recorder.step()
            recorder.tap.detach()

        return run

    def documents() -> None:
        store: dict[str, Any] = {}
        with ExitStack() as stack:
            for name, module in model.named_modules():
                handle = module.register_forward_hook(documents_way(store, name))
                stack.callback(handle.remove)
            for _ in forwards():
                store.clear()

    variants: dict[str, Callable[[], None]] = {
        "plain": plain,
        "plain again": plain,
        "floor": floor,
        "summaries": recording("summaries", keep="summary"),
        "tensors": recording("tensors"),
        "documents' way": documents,
    }
    with torch.inference_mode():
        timings = interleave(variants, rounds=rounds, warmup=2, rest=0.5)
        pairs = {
            "plain again": "plain",
            "floor": "plain",
            "summaries": "plain",
            "tensors": "floor",
            "documents' way": "plain",
        }
        for name, recorder in recorders.items():
            start = time.perf_counter()
            recorder.close()
            opening[name] += time.perf_counter() - start
            assert recorder.failure is None
        result = {
            "layers": layers,
            "hidden": width,
            "length": length,
            "modules": len(outputs),
            "megabytes": sum(nbytes) / 1e6,
            "plain_ms": timings.median("plain") * 1e3 / steps,
            "open_and_close_ms": {name: value * 1e3 for name, value in opening.items()},
            "ratios": {
                f"{name} / {base}": [timings.ratio(name, base), *timings.spread(name, base)]
                for name, base in (*pairs.items(), ("tensors", "plain"))
            },
        }
    shutil.rmtree(folder)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for size in [(12, 768, 12, 128, 3), (12, 768, 12, 1024, 1), (12, 32, 2, 16, 100)]:
        layers, width, _, length, steps = size
        result = measure(*size, options.rounds)
        if options.json:
            print(json.dumps(result))
            continue
        print(
            f"\n{layers} layers, hidden {width}, {length} tokens, {steps} forwards a timing: "
            f"{result['modules']} modules, {result['megabytes']:.1f} MB of outputs, "
            f"plain forward {result['plain_ms']:.2f} ms"
        )
        for name, value in result["open_and_close_ms"].items():
            print(f"  opening and closing, {name}: {value:.0f} ms once")
        for name, (ratio, low, high) in result["ratios"].items():
            print(f"  {name:28s} {ratio:6.3f}   (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
