"""Third way: the loop is yours, and says where it is.

python examples/monitor_direct.py [OUTPUT_DIR]
"""

from __future__ import annotations

import sys

import torch
from analysis import compute_statistics, process_attention_outputs
from small_transformer import loss_of, make_training

import tensortap as tap


def main(output_dir: str = "runs/monitor_direct", num_epochs: int = 3) -> list[float]:
    model, loader, optimizer = make_training()
    monitor = tap.Monitor(
        model,
        {
            "transformer.encoder.layers.1.self_attn": {
                "alias": "attention",
                "record_type": "single",
                "leaf": "[1]",  # of (output, weights) the weights
            },
            "transformer.encoder.layers.*.ffn": {"record_type": "epoch_full"},
        },
        [1, 3],
        output_dir,
        batch_indices=[0, 1],
    )
    losses = []

    try:
        for epoch in range(1, num_epochs + 1):
            monitor.set_epoch(epoch)

            for batch_idx, (ids, targets) in enumerate(loader):
                monitor.set_batch_idx(batch_idx)

                loss = loss_of(model, ids, targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())

            with monitor.paused(), torch.no_grad():  # a validation pass is not to be heard
                loss_of(model, *next(iter(loader)))

            for alias, layer_info in monitor.get_single_data().items():
                outputs = list(layer_info["data"].values())
                analysis = process_attention_outputs(outputs)
                monitor.save_custom_output(analysis, f"{alias}_analysis_epoch_{epoch}.pt")

            buffers = monitor.get_epoch_buffers()
            for layer, outputs in buffers.items():
                processed = compute_statistics(torch.cat(outputs, dim=0))
                monitor.save_custom_output(processed, f"custom_{layer}_epoch_{epoch}.pt")

            monitor.save_single_outputs()
            monitor.save_epoch_outputs()
            monitor.clear_current_epoch_data()
    finally:
        monitor.remove_hooks()
    return losses


if __name__ == "__main__":
    print("losses:", main(*sys.argv[1:2]))  # noqa: T201
