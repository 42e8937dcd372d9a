#!/usr/bin/env python3
"""Compile the whole model with a tap on every layer, run it, and save each layer's output.

    python test_layer_by_layer.py --test-type full                  compile, then run
    python test_layer_by_layer.py --test-type full --skip-compile   run what was compiled

Document 000's first command. Compiled is a TorchScript file of the instrumented model, kept in
traced_model/; the outputs go to traced_model/test_layers/full_model/.
"""

from __future__ import annotations

from minimax.command import COMPILED, DONE, leave, model_options, note, parser

OUTPUT = COMPILED / "test_layers" / "full_model"


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--test-type", choices=["full"], default="full", help="the whole model, all layers at once"
    )
    made.add_argument(
        "--skip-compile", action="store_true", help="run the model that was compiled before"
    )
    model_options(made, output=OUTPUT)
    asked = made.parse_args()

    from minimax.model import build_target, chosen, share_the_machine, tokens

    wanted = chosen(asked.model_path, asked.seed, asked.tiny, asked.seq_len)
    share_the_machine(wanted)
    given = tokens(wanted, asked.prompt)
    from minimax.compiled import compile_model, find_compiled
    from minimax.layers import record_compiled, recording_of, statistics_of, write_tree
    from minimax.screen import statistics_screen

    if asked.skip_compile:
        artefact = find_compiled(wanted, COMPILED)
        note(f"Reusing {artefact.file}.")
    else:
        note("Compiling …")
        target = build_target(wanted, given)
        for text in target.notes:
            note(f"note: {text}")
        artefact = compile_model(wanted, target, COMPILED)
        note(f"Compiled: {artefact.file}. On three prompts each layer is what eager computes.")
    if given.note:
        note(f"note: {given.note}")
    folder = recording_of(asked.output_dir)
    recording = record_compiled(artefact, given, folder)
    write_tree(recording, asked.output_dir)
    print(statistics_screen(statistics_of(asked.output_dir)))
    note(f"{len(recording)} layers are in {asked.output_dir}, the recording is {folder}.")
    return DONE


if __name__ == "__main__":
    leave(main)
