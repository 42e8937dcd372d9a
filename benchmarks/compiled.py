"""What taps in a compiled model cost: `python benchmarks/compiled.py`, or `make bench`.

A Llama of four layers (hidden 512, 128 tokens), compiled by each runtime. Against the plain
compiled model, in one interleaved run with medians of ratios: the plain one again (A/A, the noise),
the tapped model alone (the values come back as tensors and are dropped: no copies, no disk), and a
whole recording of summaries to disk, each with taps on the four blocks and on every layer. The aims
are 1.05 for four layers and 1.2 for all.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensortap as tap
from tensortap.taps.programs.base import Options, Program
from tensortap.taps.programs.kinds import open_program
from timing import Timings, interleave

RUNTIMES = ("torchscript", "export", "compile", "onnx", "openvino", "aoti")
AIMS = {"four": 1.05, "all": 1.2}


def build(tokens: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(1000, (1, tokens))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def compile_for(runtime: str, model: nn.Module, inputs: dict[str, Any], folder: Path) -> Any:
    """The file, or the module, that is recorded."""
    if runtime == "torchscript":
        made = torch.jit.trace(model, example_kwarg_inputs=inputs, strict=False, check_trace=False)
        torch.jit.save(made, folder / "model.pt")
        return folder / "model.pt"
    if runtime in ("export", "aoti"):
        path = folder / "model.pt2"
        torch.export.save(torch.export.export(model, (), inputs, strict=False), path)
        return path
    if runtime == "onnx":
        path = folder / "model.onnx"
        torch.onnx.export(model, (), path, kwargs=inputs, dynamo=True, verbose=False)
        return path
    if runtime == "openvino":
        import openvino

        path = folder / "model.xml"
        made = openvino.convert_model(model, example_input=inputs)
        openvino.save_model(made, path, compress_to_fp16=False)
        return path
    return model


def measure(
    runtime: str, model: nn.Module, inputs: dict[str, Any], rounds: int
) -> tuple[Timings, int]:
    """Seconds by variant, and how many layers `all` are."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        artefact = compile_for(runtime, model, inputs, folder)
        options = {"runtime": "aoti"} if runtime == "aoti" else {}
        variants: dict[str, Callable[[], object]] = {}
        for name, layers in (("four", "blocks"), ("all", "all")):
            thing = torch.compile(_copy(model)) if runtime == "compile" else artefact
            rec = stack.enter_context(
                tap.record(
                    thing,
                    folder / name,
                    layers=layers,
                    keep="summary",
                    self_check=False,
                    **options,
                )
            )
            variants[f"{name} on disk"] = lambda rec=rec: rec.run(**inputs)
            count = len(rec.layers)
        if runtime == "compile":
            plain = torch.compile(_copy(model))
            variants["plain"] = variants["again"] = lambda: plain(**inputs)
        else:
            program = open_program(artefact, Options(runtime=options.get("runtime")))
            names = [place.name for place in program.places if place.name and not place.gone]
            blocks = [name for name in names if name.startswith("model.layers.")]
            blocks = [name for name in blocks if name.count(".") == 2]
            variants["plain"] = variants["again"] = lambda: program.plain((), inputs)
            for name, layers in (("four", blocks), ("all", names)):
                variants[name] = _runner(artefact, options, layers, inputs)
        with torch.no_grad():
            return interleave(variants, rounds=rounds, warmup=3), count


def _copy(model: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(model)


def _runner(
    artefact: Path, options: dict[str, str], layers: list[str], inputs: dict[str, Any]
) -> Callable[[], object]:
    program: Program = open_program(artefact, Options(runtime=options.get("runtime")))
    tapped = program.tapped(layers, inputs=False, linears=[])
    return lambda: tapped((), inputs)


COLUMNS = ("again", "four", "all", "four on disk", "all on disk")


def line(runtime: str, timings: Timings, count: int) -> str:
    cells = [f"{runtime} ({count} layers)", f"{timings.median('plain') * 1000:.1f} ms"]
    for name in COLUMNS:
        if name not in timings.seconds:
            cells.append("")
            continue
        low, high = timings.spread(name, "plain")
        text = f"{timings.ratio(name, 'plain'):.2f} ({low:.2f}–{high:.2f})"
        cells.append(text)
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| | plain | A/A | four blocks | every layer | four, recorded | every layer, recorded |\n"
    "|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="What taps in a compiled model cost.")
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="the table alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    model, inputs = build(options.tokens)
    if not options.markdown:
        print(
            f"{options.tokens} tokens, {options.threads} thread(s), {options.rounds} rounds; aims"
        )
        print(f"{AIMS['four']} for four blocks and {AIMS['all']} for every layer\n")
    print(HEAD, flush=True)
    found: dict[str, Any] = {}
    for runtime in options.runtimes:
        timings, count = measure(runtime, model, inputs, options.rounds)
        found[runtime] = {name: list(seconds) for name, seconds in timings.seconds.items()}
        print(line(runtime, timings, count), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
