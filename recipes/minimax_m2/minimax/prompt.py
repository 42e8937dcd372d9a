"""From a prompt to token ids, with a checkpoint's tokenizer or without any.

Without one a token is a byte: the id of a byte of the text in UTF-8 is its value plus 3, as in
ByT5, and 0 is padding. An artefact takes sequences of one length, so a prompt is cut to it, or
padded behind its end, where the tokens before it cannot see: attention is causal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tensortap.errors import OptionError, TargetError

__all__ = ["VOCABULARY", "Tokens", "tokens_of"]

_PROMPT = (
    "The weights of one layer of a mixture of experts are more than the compiler takes at once, so "
    "the whole model is compiled, and every layer of it is recorded. "
)
PADDING, _SHIFT = 0, 3
VOCABULARY = 256 + _SHIFT
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Tokens:
    """One row of token ids, the text they stand for, and what was done to make them fit."""

    ids: Tensor
    prompt: str
    note: str | None


def tokens_of(prompt: str | None, seq_len: int, checkpoint: Path | None, vocabulary: int) -> Tokens:
    """A prompt as exactly `seq_len` ids below `vocabulary`; ours is as long as is asked for."""
    own = checkpoint is not None and any((checkpoint / name).is_file() for name in _TOKENIZER)
    if prompt is None:
        prompt = _PROMPT.strip() if own else (_PROMPT * (seq_len // len(_PROMPT) + 1))[:seq_len]
    if not prompt:
        raise OptionError("--prompt is empty. Give a text of at least one token.")
    if checkpoint is not None and own:
        found, padding, how = *_encoded(prompt, checkpoint), "the checkpoint's tokenizer"
    else:
        found = [byte + _SHIFT for byte in prompt.encode("utf-8", "surrogateescape")]
        padding, how = PADDING, "a token a byte"
    largest = max(found)
    if largest >= vocabulary:
        raise TargetError(
            f"The prompt has the token id {largest} ({how}), and the model's vocabulary ends at "
            f"{vocabulary - 1}. Give a checkpoint with its own tokenizer, or a larger vocabulary."
        )
    had = len(found)
    row = (found + [padding] * seq_len)[:seq_len]
    what = f"The prompt has {had} tokens ({how})"
    said = None
    if had > seq_len:
        said = f"{what}: cut to {seq_len} (--seq-len)."
    elif had < seq_len:
        said = f"{what}: padded to {seq_len} (--seq-len) behind its end."
    return Tokens(torch.tensor([row], dtype=torch.int64), prompt, said)


def _encoded(prompt: str, folder: Path) -> tuple[list[int], int]:
    """The ids that the checkpoint's own tokenizer gives, and its padding."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        ids = [int(token) for token in tokenizer(prompt)["input_ids"]]
    except Exception as error:  # transformers raises, from many places, many things
        line = (str(error).strip().splitlines() or ["no message"])[0]
        raise TargetError(
            f"The tokenizer in '{folder}' cannot be used: {type(error).__name__}: {line} "
            "Remove its files to read the prompt byte by byte."
        ) from error
    if not ids:
        raise OptionError(f"The prompt {prompt!r} has no tokens. Give a longer one.")
    padding = tokenizer.pad_token_id
    return ids, PADDING if padding is None else int(padding)
