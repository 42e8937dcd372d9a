"""First way: a training function that takes callbacks and calls them.

python examples/monitor_callbacks.py [OUTPUT_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from analysis import compute_statistics, plot_attention_patterns
from small_transformer import loss_of, make_training

import tensortap as tap

CONFIG = Path(__file__).with_name("config.json")


def encapsulated_train(config: Any, device: str, **kwargs: Any) -> list[float]:
    """Somebody's training function: it knows epochs and batches, and tells them."""
    epoch_callback = kwargs.get("epoch_callback")
    batch_callback = kwargs.get("batch_callback")
    losses = []

    for epoch in range(1, config.train.num_epochs + 1):
        if epoch_callback:
            epoch_callback(epoch)

        for batch_idx, (ids, targets) in enumerate(config.loader):
            if batch_callback:
                batch_callback(batch_idx)

            loss = loss_of(config.model, ids.to(device), targets.to(device))
            config.optimizer.zero_grad()
            loss.backward()
            config.optimizer.step()
        losses.append(loss.item())

        if hasattr(config, "monitor") and config.monitor:
            look(config.monitor, epoch)
            config.monitor.save_single_outputs()
            config.monitor.save_epoch_outputs()
            config.monitor.clear_current_epoch_data()

    if hasattr(config, "monitor") and config.monitor:
        config.monitor.remove_hooks()
    return losses


def look(monitor: tap.Monitor, epoch: int) -> None:
    """What we want to know of an epoch; nothing in one that is not recorded."""
    for alias, layer_info in monitor.get_single_data().items():
        if "attention" in alias:
            attention_weights = list(layer_info["data"].values())
            avg_attention = torch.mean(torch.stack(attention_weights), dim=0)
            plot_attention_patterns(avg_attention, monitor.output_dir / f"{alias}_{epoch}.png")
            monitor.save_custom_output(avg_attention, f"attention_analysis_epoch_{epoch}.pt")

    for alias, layer_info in monitor.get_epoch_data().items():
        all_outputs = torch.cat(list(layer_info["data"].values()), dim=0)
        monitor.save_custom_output(
            compute_statistics(all_outputs), f"epoch_stats_{alias}_epoch_{epoch}.pt"
        )


def main(output_dir: str = "runs/monitor_callbacks") -> list[float]:
    model, loader, optimizer = make_training()
    monitor = tap.Monitor.from_config(model, CONFIG, output_dir=output_dir)
    config = SimpleNamespace(
        model=model,
        loader=loader,
        optimizer=optimizer,
        train=SimpleNamespace(num_epochs=5),
        monitor=monitor,
    )
    epoch_callback = monitor.create_epoch_callback()
    batch_callback = monitor.create_batch_callback()
    return encapsulated_train(
        config, "cpu", epoch_callback=epoch_callback, batch_callback=batch_callback
    )


if __name__ == "__main__":
    print("losses:", main(*sys.argv[1:2]))  # noqa: T201
