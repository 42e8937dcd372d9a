"""`hf:DIR`: a transformers checkpoint in a local folder.

Safe by construction: safetensors alone (a `.bin` file is a pickle), no code from the folder, and
no look at the network. Weights are loaded in the dtype they were saved in unless one is asked for.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import MissingExtraError, OptionError, TargetError
from ..recording.kinds import parse
from ..regular_files import read_regular
from ..taps.programs.quiet import quietly
from .artefacts import with_inputs
from .input_ids import check_range, read_input_ids
from .options import parse_device, parse_dtype
from .target import Batch, Target

__all__ = ["load_checkpoint"]

_TAKES = (
    "attn_implementation", "device", "do_sample", "dtype", "generate", "mode", "seed", "seq_len",
)  # fmt: skip
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_WEIGHTS = "model.safetensors"
# What transformers raises, from many places, on a folder that it cannot read.
_LOADING = (
    AttributeError, ImportError, KeyError, NotImplementedError, OSError, RuntimeError,
    SafetensorError, TypeError, ValueError,
)  # fmt: skip


def load_checkpoint(
    spec: str,
    values: Mapping[str, Any],
    *,
    prompts: Sequence[str] = (),
    input_ids: str | os.PathLike[str] | None = None,
    inputs_from: Sequence[str | os.PathLike[str]] = (),
) -> Target:
    """A checkpoint in eval mode, with one batch a prompt, or the ids of a file as one batch.

    Or with what `inputs_from` has, a batch a file, for models that take other things too.
    """
    _check_options(spec, values, prompts, input_ids, inputs_from)
    folder = Path(spec.removeprefix("hf:")).expanduser()
    _check_folder(folder)
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "hf", "An hf: target") from error

    device = parse_device(str(values.get("device", "cpu")))
    dtype = _dtype(values)
    if "seed" in values:
        torch.manual_seed(int(values["seed"]))  # decides weights that the checkpoint lacks
    config = _config(transformers, folder)
    with quietly():  # importing it imports torchao, where that is installed
        kind = _model_class(transformers, config, folder)
    seq_len = int(values["seq_len"]) if "seq_len" in values else None
    batches: list[dict[str, Any]] = []
    if prompts:
        batches = _encode(transformers, folder, prompts, seq_len)
    elif input_ids is not None:
        ids = read_input_ids(Path(input_ids))
        batches = [{"input_ids": ids if seq_len is None else ids[:, :seq_len]}]
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    for index, batch in enumerate(batches):
        where = f"The prompt {prompts[index]!r}" if prompts else f"{os.fspath(input_ids or '')}"
        check_range(batch["input_ids"], vocabulary, where)
    model, notes = _model(transformers, kind, config, folder, dtype, values)
    model = model.to(device).eval()
    writes = "generate" in values
    if writes:
        _check_generates(model, folder)
    fit = _given if writes else _fit
    target = Target(
        model,
        [fit(model, config, batch, device) for batch in batches] or Batch(),
        run=_generating(int(values["generate"]), _sampled(values)) if writes else None,
        decode=_decoder(transformers, folder) if writes else None,
        mode=None if values.get("mode") is None else str(values["mode"]),
        name=spec,
        prompt=list(prompts) or None,
        config=json.loads(json.dumps(config.to_dict(), default=str)),
        notes=notes,
    )
    return _with_inputs(target, inputs_from, vocabulary) if inputs_from else target


def _with_inputs(
    target: Target, files: Sequence[str | os.PathLike[str]], vocabulary: int | None
) -> Target:
    found = with_inputs(target, files)
    for file, batch in zip(files, found.batches, strict=True):
        ids = batch.kwargs.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            check_range(ids, vocabulary, os.fspath(file))
    return found


def _check_options(
    spec: str,
    values: Mapping[str, Any],
    prompts: Sequence[str],
    input_ids: str | os.PathLike[str] | None,
    inputs_from: Sequence[str | os.PathLike[str]],
) -> None:
    unknown = [key for key in values if key not in _TAKES]
    if unknown:
        raise OptionError(
            f"The target {spec!r} does not take {' and '.join(map(repr, unknown))}. "
            f"It takes {', '.join(_TAKES)}, and --prompt, --input-ids or --inputs-from."
        )
    ways = {
        "--prompt": bool(prompts),
        "--input-ids": input_ids is not None,
        "--inputs-from": bool(inputs_from),
    }
    named = [flag for flag, on in ways.items() if on]
    if len(named) > 1:
        number = "both" if len(named) == 2 else "all"
        raise OptionError(f"{' and '.join(named)} are {number} given. Give one of them.")
    if not named:
        raise OptionError(
            f"The target {spec!r} has no inputs. Give --prompt TEXT, --input-ids FILE, or "
            "--inputs-from FILE."
        )
    if inputs_from and "seq_len" in values:
        raise OptionError("--seq-len cuts --prompt and --input-ids, not what --inputs-from holds.")
    for key, least in (("seq_len", 1), ("seed", 0), ("generate", 1)):
        text = str(values.get(key, 1))
        if not text.isdecimal() or int(text) < least:
            raise OptionError(f"{key} is {text!r}, expected a whole number from {least}.")
    if "do_sample" in values and "generate" not in values:
        raise OptionError("do_sample says how tokens are generated. Say how many: --generate N.")
    _sampled(values)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise TargetError(
            f"The checkpoint {str(folder)!r} {what}. hf: takes a local folder and never downloads."
        )
    if not (folder / "config.json").is_file():
        raise TargetError(
            f"The folder {str(folder)!r} has no config.json, so it is no transformers checkpoint. "
            "Make one with model.save_pretrained(folder)."
        )
    index = folder / f"{_WEIGHTS}.index.json"
    if index.is_file():
        _check_shards(folder, index)
    elif not (folder / _WEIGHTS).is_file():
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt") for p in folder.glob(pattern))
        if pickled:
            raise TargetError(
                f"The checkpoint {str(folder)!r} holds its weights in {pickled[0]}, a pickle, "
                "which can run code and is not loaded. Save it again with "
                "model.save_pretrained(folder), which writes safetensors."
            )
        raise TargetError(f"The checkpoint {str(folder)!r} has no weights: {_WEIGHTS} is missing.")


def _check_shards(folder: Path, index: Path) -> None:
    try:
        shards = set(parse(read_regular(index, 64 << 20))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{str(index)!r} is damaged: it is no index of weights.") from error
    missing = sorted(str(shard) for shard in shards if not (folder / str(shard)).is_file())
    if missing:
        raise TargetError(
            f"The checkpoint {str(folder)!r} is not complete: {len(missing)} of {len(shards)} "
            f"files of weights are missing, {missing[0]!r} the first."
        )


def _config(transformers: Any, folder: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
    except _LOADING as error:
        raise TargetError(
            f"The config.json in {str(folder)!r} is not one that transformers "
            f"{transformers.__version__} knows: {_first_line(error)} Code that comes with a "
            "checkpoint is not run."
        ) from error


def _model_class(transformers: Any, config: Any, folder: Path) -> Any:
    names = getattr(config, "architectures", None) or []
    if not names:
        return transformers.AutoModel
    kind = getattr(transformers, str(names[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise TargetError(
            f"The architecture {names[0]!r} of {str(folder)!r} is not part of transformers "
            f"{transformers.__version__}. Install a version that has it, or write a target "
            "function; code that comes with a checkpoint is not run."
        )
    return kind


@contextlib.contextmanager
def _without_bar(transformers: Any) -> Iterator[None]:
    """Without the bar of loading weights, which are on this machine's disk."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _model(
    transformers: Any,
    kind: Any,
    config: Any,
    folder: Path,
    dtype: torch.dtype | None,
    values: Mapping[str, Any],
) -> tuple[Any, tuple[str, ...]]:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    dtype_option = "dtype" if version >= (4, 56) else "torch_dtype"
    extra = {key: str(values[key]) for key in ("attn_implementation",) if key in values}
    try:
        with _without_bar(transformers):  # one a mode would be many
            model, info = kind.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                **{dtype_option: dtype or "auto"},
                **_LOCAL,
                **extra,
            )
    except _LOADING as error:
        raise TargetError(
            f"The weights in {str(folder)!r} cannot be loaded: {_first_line(error)}"
        ) from error
    missing = sorted(map(str, info.get("missing_keys", ())))
    if not missing:
        return model, ()
    return model, (
        f"The checkpoint has no values for {len(missing)} weights, which are random: "
        f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}.",
    )


def _dtype(values: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype, or that of a mode which is the name of one; other modes are labels alone."""
    dtype, mode = values.get("dtype"), values.get("mode")
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None:
        return parse_dtype(str(dtype))
    return parse_dtype(mode) if mode in ("fp32", "bf16", "fp16", "fp64") else None


def _encode(
    transformers: Any, folder: Path, prompts: Sequence[str], seq_len: int | None
) -> list[dict[str, Any]]:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except _LOADING as error:
        there = any(folder.glob("*token*")) or any(folder.glob("*vocab*"))
        reason = f" that can be loaded: {_first_line(error)}" if there else "."
        raise TargetError(
            f"The checkpoint {str(folder)!r} has no tokenizer{reason} Save one with "
            "tokenizer.save_pretrained(folder), or give --input-ids FILE."
        ) from error
    cut = {} if seq_len is None else {"truncation": True, "max_length": seq_len}
    batches = [dict(tokenizer(prompt, return_tensors="pt", **cut)) for prompt in prompts]
    for prompt, batch in zip(prompts, batches, strict=True):
        if batch["input_ids"].numel() == 0:
            raise OptionError(f"The prompt {prompt!r} has no tokens. Give a longer one.")
        batch["input_ids"] = batch["input_ids"].long()
    return batches


def _fit(
    model: Any, config: Any, batch: Mapping[str, Tensor], device: torch.device
) -> dict[str, Any]:
    """Only what the model's forward takes, and the first decoder token where it needs one."""
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        raise TargetError(
            f"{type(model).__name__} takes {model.main_input_name!r}, not token ids. Write a "
            "target function that returns (model, inputs)."
        )
    kept = {key: value.to(device) for key, value in batch.items() if key in takes}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            rows = kept["input_ids"].shape[0]
            kept["decoder_input_ids"] = torch.full((rows, 1), start, device=device)
    return kept


def _given(
    model: Any, config: Any, batch: Mapping[str, Tensor], device: torch.device
) -> dict[str, Any]:
    """What `generate` is given: it makes the decoder's first token itself."""
    return {
        key: value.to(device)
        for key, value in _fit(model, config, batch, device).items()
        if not key.startswith("decoder_")
    }


def _check_generates(model: Any, folder: Path) -> None:
    can = getattr(model, "can_generate", None)
    if not callable(can) or not can():
        raise TargetError(
            f"The {type(model).__name__} of {str(folder)!r} has no head that writes tokens, so it "
            "cannot generate. Leave out --generate, or save the checkpoint of a model that can."
        )


def _sampled(values: Mapping[str, Any]) -> bool:
    text = str(values.get("do_sample", False)).lower()
    if text not in ("true", "false", "1", "0"):
        raise OptionError(f"do_sample is {text!r}, expected true or false.")
    return text in ("true", "1")


def _generating(count: int, sampled: bool) -> Callable[[Any, Batch], Any]:
    """Runs a model to the end of the tokens that it writes, one beam."""

    def run(model: Any, batch: Batch) -> Any:
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": sampled, "num_beams": 1}
        if getattr(model.generation_config, "pad_token_id", None) is None:
            ends = model.generation_config.eos_token_id
            options["pad_token_id"] = ends[0] if isinstance(ends, list) else (ends or 0)
        with warnings.catch_warnings():
            # a temperature that the checkpoint sets means nothing without sampling
            warnings.simplefilter("ignore", UserWarning)
            return model.generate(*batch.args, **options, **batch.kwargs)

    return run


def _decoder(transformers: Any, folder: Path) -> Callable[[list[int]], str] | None:
    """What turns tokens into text; None where the checkpoint has no tokenizer."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except _LOADING:
        return None

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    return decode


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = text[0].strip() if text else "no message"
    return f"{type(error).__name__}: {line}{'' if line.endswith('.') else '.'}"
