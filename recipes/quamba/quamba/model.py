"""The float model, from seeded random weights or a local checkpoint, and its other modes.

The only module here that imports transformers: import it where a model is built.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensortap.errors import TargetError
from tensortap.taps.programs.quiet import quietly

from .calibration import Calibration
from .integers import int8_matmul_is_exact
from .layers import Int8Head
from .mixer import float_mixer, int8_mixer
from .mode_config import ModeConfig

with quietly():  # it imports torchao where that is installed, which talks
    from transformers import MambaConfig, MambaForCausalLM

__all__ = ["SHAPES", "TINY", "Shape", "checkpoint", "in_mode", "seeded", "with_mixers"]

_MODEL: Any = MambaForCausalLM  # untyped in transformers


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and how many tokens a segment of the scan has."""

    hidden: int
    state: int
    vocabulary: int
    segment: int
    layers: int = 24
    kernel: int = 4

    def config(self) -> MambaConfig:
        return MambaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            state_size=self.state,
            num_hidden_layers=self.layers,
            conv_kernel=self.kernel,
            rescale_prenorm_residual=True,
            use_cache=False,
        )


SHAPES = {"quamba-130m-w8a8": Shape(hidden=768, state=16, vocabulary=50280, segment=128)}
TINY = Shape(hidden=32, state=4, vocabulary=256, segment=16)


def seeded(shape: Shape, seed: int) -> MambaForCausalLM:
    """A model with random weights, the same for the same seed.

    Fresh weights give tame activations, which no percentile would clip. So the embedding has unit
    variance, in_proj and x_proj keep theirs, and each channel of conv1d has a gain of its own,
    exp(0.8 N(0, 1)): a few channels of the SSM input reach ten times what the others do, as in
    trained models of this kind. out_proj is small, as GPT-2 begins, so that 24 layers do not
    drown the first.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _MODEL(shape.config())
        with torch.no_grad():
            nn.init.normal_(model.backbone.embeddings.weight)
            for block in model.backbone.layers:
                mixer = block.mixer
                nn.init.normal_(mixer.in_proj.weight, std=shape.hidden**-0.5)
                nn.init.normal_(mixer.x_proj.weight, std=mixer.intermediate_size**-0.5)
                mixer.conv1d.weight.mul_((0.8 * torch.randn(mixer.intermediate_size, 1, 1)).exp())
    built: MambaForCausalLM = model.eval()
    return built


def checkpoint(folder: Path) -> MambaForCausalLM:
    """A local Mamba checkpoint in float32: safetensors alone, no code, no network."""
    _check(folder)
    _silence()
    try:
        config = MambaConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type != "mamba" or config.hidden_act != "silu":
            raise TargetError(
                f"The checkpoint {str(folder)!r} is a {config.model_type!r} with "
                f"{config.hidden_act!r}, expected 'mamba' with 'silu'."
            )
        config.use_cache = False
        model, info = _MODEL.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except TargetError:
        raise
    except Exception as error:  # transformers raises many kinds on a folder that it cannot read
        first = (str(error).strip().splitlines() or ["no message"])[0]
        raise TargetError(
            f"The checkpoint {str(folder)!r} cannot be loaded: {type(error).__name__}: {first}"
        ) from error
    missing = sorted(map(str, info.get("missing_keys", ())))
    if missing:
        raise TargetError(
            f"The checkpoint {str(folder)!r} has no values for {len(missing)} weights, "
            f"{missing[0]!r} the first: it is not the whole of a Mamba language model."
        )
    built: MambaForCausalLM = model.eval()
    return built


def _silence() -> None:
    """Let transformers draw no bar: our notes say what is loaded, also into a file."""
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()


def _check(folder: Path) -> None:
    weights = ("model.safetensors", "model.safetensors.index.json")
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        problem = f"{what}. Give a local folder, or none for seeded random weights."
    elif not (folder / "config.json").is_file():
        problem = (
            "has no config.json, so it is no transformers checkpoint. Make one with "
            "model.save_pretrained(folder)."
        )
    elif not any((folder / name).is_file() for name in weights):
        problem = (
            "has no model.safetensors. Other files of weights are pickles, which can run code and "
            "are not loaded: save it again with model.save_pretrained(folder)."
        )
    else:
        return
    raise TargetError(f"The checkpoint {os.fspath(folder)!r} {problem}")


def with_mixers(model: MambaForCausalLM, segment: int) -> MambaForCausalLM:
    """Our mixers in place of the model's own, on the same weights; the model itself changes."""
    blocks: Any = model.backbone.layers
    for block in blocks:
        block.mixer = float_mixer(block.mixer, segment)
    return model


def in_mode(source: Any, mode: ModeConfig, found: Calibration | None = None) -> nn.Module:
    """A model of its own that computes as the mode says; int8 ones need a calibration."""
    copies: dict[int, Any] = {}  # what stands in the copy in place of a module of the source
    if mode.quantised:
        if found is None:
            raise ValueError(f"Mode {mode.name} needs the scales of a calibration.")
        int8_matmul_is_exact()  # asked once, here: a forward that looks at values cannot be planned
        for block, scales in zip(source.backbone.layers, found.layers, strict=True):
            mixer = block.mixer
            copies[id(mixer)] = int8_mixer(
                mixer, mode, scales, mixer.scan.segment, hadamard=found.hadamard
            )
        copies[id(source.lm_head)] = Int8Head(source.lm_head, found.head)
    model: Any = copy.deepcopy(source, copies)
    if mode.dtype == "fp16":
        model = model.half()
    built: nn.Module = model.eval().requires_grad_(False)
    return built
