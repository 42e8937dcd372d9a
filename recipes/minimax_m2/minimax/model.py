"""The model: MiniMax-M2 from transformers with 62 layers and small widths, or a checkpoint."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tensortap import Target
from tensortap.errors import MissingExtraError, OptionError, TargetError
from tensortap.taps.programs.quiet import quietly
from tensortap.targets.load import load_target

from .prompt import VOCABULARY, Tokens, tokens_of

__all__ = [
    "LAYERS",
    "Chosen",
    "build_target",
    "can_group",
    "chosen",
    "experts_of",
    "share_the_machine",
    "tokens",
]

LAYERS = ("embedding", "blocks", "final_norm")
SEQ_LEN = 128
_SAMPLES, _SAMPLE = 64, 1 << 14


@dataclass(frozen=True)
class Widths:
    """What is smaller than in MiniMax-M2; the number of layers is not."""

    hidden_size: int = 128
    intermediate_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


TINY = Widths(32, 16, 2, 1, 16, 4, 2)


@dataclass(frozen=True)
class Chosen:
    """Which model, and how long a sequence: what a compiled artefact is made for."""

    checkpoint: Path | None
    seed: int
    tiny: bool
    seq_len: int

    def identity(self) -> dict[str, Any]:
        """The same in plain values; another file, weight or setting is another identity.

        So is another version of what computes: it need not compute, or draw, the same.
        """
        model: dict[str, Any]
        if self.checkpoint is None:
            model = {"settings": self.settings, "seed": self.seed}
        else:
            model = {"checkpoint": str(self.checkpoint), "files": _fingerprint(self.checkpoint)}
        versions = {name: metadata.version(name) for name in ("torch", "transformers")}
        return {"model": model, "seq_len": self.seq_len, "versions": versions}

    @property
    def widths(self) -> Widths:
        return TINY if self.tiny else Widths()

    @property
    def settings(self) -> dict[str, Any]:
        """The built-in model's config."""
        return {
            **asdict(self.widths),
            "vocab_size": VOCABULARY,
            "num_hidden_layers": 62,
            "max_position_embeddings": max(2048, self.seq_len),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
            # With transformers' 0.02 narrow blocks would add next to nothing.
            "initializer_range": 0.1,
            "bos_token_id": None,
            "eos_token_id": 1,
            "architectures": ["MiniMaxM2ForCausalLM"],
        }


def chosen(
    model_path: Path | None = None, seed: int = 0, tiny: bool = False, seq_len: int | None = None
) -> Chosen:
    """The user's wishes, with what they left open filled in."""
    if model_path is not None and not (model_path / "config.json").is_file():
        what = "has no config.json" if model_path.is_dir() else "is no folder"
        raise OptionError(
            f"--model-path is '{model_path}', which {what}. Give the folder of a local checkpoint, "
            "as model.save_pretrained(folder) writes it; nothing is downloaded."
        )
    return Chosen(
        checkpoint=None if model_path is None else model_path.resolve(),
        seed=seed,
        tiny=tiny and model_path is None,
        seq_len=SEQ_LEN if seq_len is None else seq_len,
    )


def share_the_machine(wanted: Chosen) -> None:
    """Run the built-in model on one thread.

    Its layers are so narrow that two threads gain nothing, and where somebody else has a core they
    wait for each other three times as long as they compute.
    """
    if wanted.checkpoint is None:
        torch.set_num_threads(1)


def tokens(wanted: Chosen, prompt: str | None) -> Tokens:
    """The prompt as token ids, without building the model."""
    return tokens_of(prompt, wanted.seq_len, wanted.checkpoint, _vocabulary(wanted.checkpoint))


def build_target(wanted: Chosen, given: Tokens, device: str = "cpu") -> Target:
    """The model in eval mode on a device, with the prompt as its one batch."""
    target = _seeded(wanted) if wanted.checkpoint is None else _loaded(wanted, given)
    model = target.model.to(device).eval().requires_grad_(False)
    model.config.use_cache = False  # a cache among the outputs can be neither traced nor compared
    notes = list(target.notes)
    if experts_of(model) == "grouped_mm" and not can_group(device, model.dtype):
        model.set_experts_implementation("eager")
        notes.append(f"{device} cannot multiply experts in groups as {model.dtype}: one by one.")
    return replace(
        target,
        model=model,
        notes=tuple(notes),
        inputs={"input_ids": given.ids.to(device)},
        prompt=[given.prompt],
        config=json.loads(json.dumps(model.config.to_dict(), default=str)),
    )


def experts_of(model: Any) -> str | None:
    """How transformers multiplies tokens with their experts; None where a model has no choice."""
    ask = getattr(model, "get_experts_implementation", None)
    return None if ask is None else ask().get("")


def can_group(device: str, dtype: torch.dtype) -> bool:
    """Whether torch can multiply groups of tokens with their experts here, in this dtype."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped is None:
        return True  # transformers has a way of its own for an older torch
    with torch.device(device):
        rows, experts = torch.ones(16, 16, dtype=dtype), torch.ones(2, 16, 16, dtype=dtype)
        ends = torch.tensor([8, 16], dtype=torch.int32)
    try:
        grouped(rows, experts, offs=ends)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _seeded(wanted: Chosen) -> Target:
    try:
        with quietly():  # it imports torchao where that is installed, which talks
            import transformers

            kind: Any = transformers.MiniMaxM2ForCausalLM
            settings: Any = transformers.MiniMaxM2Config
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            "transformers in a version with MiniMaxM2ForCausalLM", "hf", "The built-in model"
        ) from error
    config = settings(**wanted.settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(wanted.seed)
        model = kind(config)
    note = f"The weights are random, by seed {wanted.seed}; --model-path DIR takes a checkpoint."
    return Target(model, {}, name="minimax_m2", notes=(note,))


def _loaded(wanted: Chosen, given: Tokens) -> Target:
    """The checkpoint as an `hf:` target: safetensors, local files, no code of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ids.json"
        file.write_text(json.dumps(given.ids.tolist()))
        return load_target(f"hf:{wanted.checkpoint}", {"seed": wanted.seed}, input_ids=file)


def _vocabulary(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return VOCABULARY
    try:
        config = json.loads((checkpoint / "config.json").read_text())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError) as error:
        raise TargetError(f"The config.json in '{checkpoint}' cannot be read: {error}") from error
    return int(size) if size else 1 << 62


def _fingerprint(folder: Path) -> str:
    """What changes when a checkpoint's files do, without reading gigabytes of them.

    A copy may keep the time of another one, and all of one architecture have one size, so parts of
    each file are read too: training leaves hardly a weight as it was.
    """
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.glob("*")):
        if file.suffix in (".safetensors", ".json") and file.is_file():
            about = file.stat()
            found.update(f"{file.name} {about.st_size} {about.st_mtime_ns}\n".encode())
            with file.open("rb") as data:
                for part in range(_SAMPLES):
                    data.seek(about.st_size * part // _SAMPLES)
                    found.update(data.read(_SAMPLE))
    return found.hexdigest()
