"""How others watch training, for benchmarks/monitor.py: each as its own documentation has it used.

Every peer keeps something else, so each counts the numbers that it keeps a step (`kept`), and none
is asked for more than it must be: no graphs, no full tensors, everything offline and on this disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training_model import GPT, Size, Training, batches, build

__all__ = ["PEERS", "Peer", "Wandb"]

BINS = 64  # of wandb's histograms: as many counts, and one edge more


class Peer(Training):
    """A training with somebody else's watcher; `kept` is how many numbers a step leaves behind."""

    kept: float = 0.0

    def __init__(self, name: str, size: Size, folder: Path) -> None:
        super().__init__(build(size, name), batches(size))
        self.name, self.size, self.folder = name, size, folder
        self.stack = ExitStack()
        with contextlib.redirect_stdout(None):
            self.attach()

    @abstractmethod
    def attach(self) -> None: ...

    def close(self) -> None:
        self.stack.close()


def named_parameters(model: GPT) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in model.named_parameters() if "blocks" in name]


def six_statistics(tensor: torch.Tensor) -> list[float]:
    """What the documents' hooks compute, one number after the other."""
    f = tensor.detach().float()
    return [
        f.mean().item(),
        f.std().item(),
        f.min().item(),
        f.max().item(),
        torch.isnan(f).any().item(),
        torch.isinf(f).any().item(),
    ]


class Naive(Peer):
    """Hooks with six torch statistics and `.item()`, on what is asked for; kept in memory."""

    signals: Sequence[str] = ("outputs", "grads")

    def attach(self) -> None:
        self.found: dict[str, list[float]] = {}
        for name, block in self.model.blocks.named_children():
            hook = block.register_forward_hook(self.heard(name))
            self.stack.callback(hook.remove)

    def heard(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            self.found[f"output/{name}"] = six_statistics(out)
            if "grads" in self.signals:
                out.register_hook(lambda grad: self.keep(f"grad/{name}", grad))

        return hook

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        self.found[name] = six_statistics(tensor)

    def before_step(self, step: int) -> None:
        if "params" in self.signals:
            for name, parameter in named_parameters(self.model):
                self.keep(f"param/{name}", parameter)
                if parameter.grad is not None:
                    self.keep(f"grad_param/{name}", parameter.grad)

    def after_step(self, step: int) -> None:
        self.kept = sum(len(values) for values in self.found.values())


class NaiveWithParameters(Naive):
    signals = ("outputs", "grads", "params")


class Wandb(Peer):
    """wandb.watch, offline, a histogram of every parameter's gradient (and of the parameter)."""

    log = "gradients"
    count = 0

    def attach(self) -> None:
        import wandb

        if wandb.run is None:
            os.environ["WANDB_SILENT"] = "true"
            os.environ["WANDB_CONSOLE"] = "off"
            wandb.init(mode="offline", dir=str(self.folder), project="bench")
        self.wandb = wandb
        wandb.watch(self.model, log=self.log, log_freq=1, idx=Wandb.count)
        Wandb.count += 1
        self.stack.callback(wandb.unwatch, self.model)
        each = len(list(self.model.parameters())) * (2 * BINS + 1)
        self.kept = each * (2 if self.log == "all" else 1)

    def after_step(self, step: int) -> None:
        self.wandb.log({f"{self.log}/step": step})  # commits what the hooks gathered

    @staticmethod
    def finish() -> None:
        """One run holds every wandb variant; it ends when all of them are closed."""
        if Wandb.count:
            import wandb

            wandb.finish()


class WandbAll(Wandb):
    log = "all"


class TensorBoard(Peer):
    """add_histogram of every parameter's gradient after the backward pass."""

    activations = False

    def attach(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder / self.name))
        self.stack.callback(self.writer.close)
        self.counted = 0
        inner = self.writer._get_file_writer().add_summary  # only to count what it keeps

        def add_summary(summary: Any, *args: Any, **kwargs: Any) -> None:
            self.counted += sum(2 * len(value.histo.bucket) + 5 for value in summary.value)
            inner(summary, *args, **kwargs)

        self.writer._get_file_writer().add_summary = add_summary
        if self.activations:
            for name, block in self.model.blocks.named_children():
                hook = block.register_forward_hook(
                    lambda m, a, out, name=name: self.writer.add_histogram(
                        f"output/{name}", out.detach(), self.steps
                    )
                )
                self.stack.callback(hook.remove)

    def before_step(self, step: int) -> None:
        if not self.activations:
            for name, parameter in named_parameters(self.model):
                self.writer.add_histogram(f"grad/{name}", parameter.grad, step)

    def after_step(self, step: int) -> None:
        self.kept = self.counted / (step + 1)


class TensorBoardActivations(TensorBoard):
    activations = True


class Torchlens(Peer):
    """torchlens.trackers.watch (2.x), every step, to a file of JSON lines."""

    signals: Sequence[str] = ("activations",)

    def attach(self) -> None:
        from torchlens.trackers import JSONLSink, watch

        logging.getLogger("torchlens").setLevel(logging.ERROR)
        self.path = self.folder / f"{self.name}.jsonl"
        activations = "activations" in self.signals
        # its selector takes prefixes: "blocks.1" would also be blocks.10 and everything inside
        blocks = [f"blocks.{n}.out" for n in range(self.size.layers)]
        self.watch = watch(
            self.model,
            to=JSONLSink(self.path),
            signals=self.signals,
            select=blocks if activations else ["blocks."],
            optimizer=None if activations else self.optimizer,
            example_input=self.data[0][0] if activations else None,
            every=1,
        )
        self.stack.callback(self.watch.close)

    def within(self, step: int) -> AbstractContextManager[Any]:
        return self.watch.step(step)

    def close(self) -> None:
        super().close()
        scalars = sum('"scalar"' in line for line in self.path.open())
        self.kept = scalars / self.steps


class TorchlensGradients(Torchlens):
    signals = ("gradients",)


class TorchlensParameters(Torchlens):
    signals = ("gradients", "parameters", "updates")


PEERS: dict[str, tuple[str, type[Peer]]] = {
    "naive hooks: outputs, grads": ("", Naive),
    "naive hooks: also params, their grads": ("", NaiveWithParameters),
    "wandb.watch gradients": ("wandb", Wandb),
    "wandb.watch all": ("wandb", WandbAll),
    "TensorBoard histograms of gradients": ("tensorboard", TensorBoard),
    "TensorBoard histograms of outputs": ("tensorboard", TensorBoardActivations),
    "torchlens.watch outputs": ("torchlens", Torchlens),
    "torchlens.watch gradients": ("torchlens", TorchlensGradients),
    "torchlens.watch gradients, params, updates": ("torchlens", TorchlensParameters),
}
"""By the row's name: the package that must be there, and the variant."""
