#!/usr/bin/env python3
"""Run the whole model eagerly, on a GPU where there is one, and save each layer's output.

    python test_layer_by_layer_gpu.py --test-type extract-all

Document 000's second command, and the reference for the first: the same model, prompt and files,
in traced_model/gpu_reference/full_model/.
"""

from __future__ import annotations

from minimax.command import COMPILED, DONE, leave, model_options, note, parser

OUTPUT = COMPILED / "gpu_reference" / "full_model"


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--test-type",
        choices=["extract-all"],
        default="extract-all",
        help="the outputs of all layers",
    )
    made.add_argument("--device", metavar="NAME", help="cpu or cuda (default: cuda where it is)")
    model_options(made, output=OUTPUT)
    asked = made.parse_args()

    from minimax.layers import record_eager, recording_of, statistics_of, write_tree
    from minimax.model import build_target, chosen, share_the_machine, tokens
    from minimax.screen import statistics_screen

    wanted = chosen(asked.model_path, asked.seed, asked.tiny, asked.seq_len)
    share_the_machine(wanted)
    given = tokens(wanted, asked.prompt)
    device = _device(asked.device)
    target = build_target(wanted, given, device)
    for text in (*target.notes, *([given.note] if given.note else [])):
        note(f"note: {text}")
    folder = recording_of(asked.output_dir)
    recording = record_eager(target, given, folder)
    write_tree(recording, asked.output_dir)
    print(statistics_screen(statistics_of(asked.output_dir)))
    note(f"{len(recording)} layers are in {asked.output_dir}, the recording is {folder}.")
    return DONE


def _device(asked: str | None) -> str:
    """CUDA where there is one, else the CPU, and which of them is said."""
    import torch

    from tensortap.targets.options import parse_device

    if asked is not None:
        return str(parse_device(asked))
    if torch.cuda.is_available():
        note(f"Running on {torch.cuda.get_device_name()}.")
        return "cuda"
    note("Running on the CPU: there is no CUDA device here.")
    return "cpu"


if __name__ == "__main__":
    leave(main)
