"""Second way: a wrapper around the training function.

python examples/monitor_wrapper.py [OUTPUT_DIR]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from small_transformer import loss_of, make_training

import tensortap as tap


def main(output_dir: str = "runs/monitor_wrapper") -> list[float]:
    model, loader, optimizer = make_training()

    def encapsulated_train(
        num_epochs: int,
        epoch_callback: Callable[[int], None] | None = None,
        batch_callback: Callable[[int], None] | None = None,
    ) -> list[float]:
        losses = []
        for epoch in range(1, num_epochs + 1):
            if epoch_callback:
                epoch_callback(epoch)
            for batch_idx, (ids, targets) in enumerate(loader):
                if batch_callback:
                    batch_callback(batch_idx)
                loss = loss_of(model, ids, targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        return losses

    layers_to_monitor = {
        "transformer.encoder.layers.0.self_attn": {
            "alias": "attention_weights",
            "record_type": "single",  # both items of the tuple: the output and the weights
        },
        "transformer.encoder.layers.0.ffn": {
            "alias": "ffn_epoch_stats",
            "record_type": "epoch_full",
        },
    }
    monitor = tap.Monitor(model, layers_to_monitor, [1, 5], output_dir, batch_indices=[0, 2])
    trainer = tap.MonitoredTrainer(monitor)
    monitored_train = trainer.wrap_training_function(encapsulated_train)
    return monitored_train(5)


if __name__ == "__main__":
    print("losses:", main(*sys.argv[1:2]))  # noqa: T201
