"""The files of `torch.export`: told from others by the members of the archive, and loaded."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ....errors import TargetError

__all__ = ["aoti_damage", "holds_aoti", "holds_export", "load_exported"]

_MOST = 1 << 28  # bytes of the graph that are searched for the operators it needs


def holds_aoti(path: Path) -> bool:
    """Whether a file is a package of AOTInductor."""
    return any("data/aotinductor/" in f"/{name}" for name in _members(path))


def holds_export(path: Path) -> bool:
    """Whether a file is an archive of `torch.export`, of today's form or an earlier one."""
    names = _members(path)
    return any(_is_graph(name) for name in names) and not holds_aoti(path)


def aoti_damage(path: Path) -> str | None:
    """What is wrong with a package of AOTInductor, or None: torch loads whatever it is given, and
    code that is cut short takes the whole process with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            if bad is not None:
                return f"its member '{bad}' is damaged."
            codes = [
                i for i in archive.infolist() if i.filename.endswith((".so", ".dylib", ".pyd"))
            ]
            if not codes:
                return "it holds no compiled code."
            for item in codes:
                with archive.open(item) as code:
                    if not _is_code(code.read(64), item.file_size):
                        return f"its member '{item.filename}' is no whole library."
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:
        return _first(str(error))
    return None


def _is_code(head: bytes, size: int) -> bool:
    """Whether a file begins as a library does and, where its header says so, is as long."""
    if head[:4] != b"\x7fELF":
        return head[:2] == b"MZ" or head[:4] in (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
    if len(head) < 64 or head[4] != 2:  # 64 bits
        return False
    order = "<" if head[5] == 1 else ">"
    start = struct.unpack_from(f"{order}Q", head, 0x28)[0]
    entry, count = struct.unpack_from(f"{order}HH", head, 0x3A)
    return bool(start + entry * count <= size)


def load_exported(path: Path) -> Any:
    """The exported program of a file."""
    if not zipfile.is_zipfile(path):
        raise TargetError(
            f"'{path}' is no archive of torch.export: expected a zip file as torch.export.save "
            "writes it. Save it again, or name the runtime with --runtime."
        )
    if not holds_export(path):
        what = (
            "is a package of AOTInductor, whose code holds no layers; open it with --runtime aoti."
            if holds_aoti(path)
            else "is a zip file, but holds no exported program (models/*.json). If it is "
            "TorchScript, open it with --runtime torchscript; else write the program again with "
            "torch.export.save."
        )
        raise TargetError(f"'{path}' {what}")
    _register(path)
    try:
        with _quiet() as said, _no_code(), torch.serialization.safe_globals(_caches(path)):
            return torch.export.load(path)
    except Exception as error:
        if _has_pickle(error):
            raise TargetError(
                f"The exported program '{path}' holds Python objects besides tensors, and loading "
                "them could run code. If you trust it, load it with torch.export.load in a target "
                "function and return that."
            ) from error
        words = next((text for text in said if text), "") or str(error)
        raise TargetError(
            f"The exported program '{path}' cannot be loaded: {_first(words)} If it uses operators "
            "or output classes of a library, import that library first (a target function may)."
        ) from error


def _has_pickle(error: BaseException | None) -> bool:
    """Whether torch refused to unpickle something, here or in what led to it."""
    while error is not None:
        if type(error).__name__ == "UnpicklingError" or "weights_only" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _members(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return []


def _is_graph(name: str) -> bool:
    return bool(
        re.search(r"(^|/)models/[^/]+\.json$", name)
        or name.endswith("serialized_exported_program.json")
    )


def _register(path: Path) -> None:
    """Make the operators and output classes known that a graph names, where they are installed."""
    text = ""
    with zipfile.ZipFile(path) as archive:
        for item in archive.infolist():
            if _is_graph(item.filename) and item.file_size < _MOST:
                text += archive.read(item).decode("utf-8", "replace")
    if "quantized_decomposed" in text:
        _attempt("torch.ao.quantization.fx._decomposed")
    if "torchao" in text:
        _attempt("torchao")
    for name in sorted(set(re.findall(r"transformers(?:\.\w+)+", text))):
        _attempt(name.rpartition(".")[0])
    if "DynamicCache" in text:
        with contextlib.suppress(Exception):  # a second registration is refused
            executorch = importlib.import_module("transformers.integrations.executorch")
            executorch.register_dynamic_cache_export_support()


def _caches(path: Path) -> list[Any]:
    """The classes of caches that are among the example inputs, which hold tensors and no more."""
    found: list[Any] = []
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if "/sample_inputs/" in name and name.endswith(".pt"):
                with contextlib.suppress(Exception):
                    source = io.BytesIO(archive.read(name))
                    for whole in torch.serialization.get_unsafe_globals_in_checkpoint(source):
                        home, _, kind = whole.rpartition(".")
                        if home == "transformers.cache_utils":
                            found.append(getattr(importlib.import_module(home), kind))
    return found


def _attempt(module: str) -> None:
    with contextlib.suppress(Exception):
        importlib.import_module(module)


@contextlib.contextmanager
def _no_code() -> Iterator[None]:
    """Have torch refuse to unpickle anything but tensors and plain containers.

    By itself it would try that first and then do what the file says.
    """
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _quiet() -> Iterator[list[str]]:
    """Collect what torch logs about a file that it cannot read, instead of showing it."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = logging.getLogger("torch.export")
    handler, before = Collect(), logger.propagate
    others, logger.handlers = logger.handlers, [handler]
    logger.propagate = False
    try:
        yield said
    finally:
        logger.handlers, logger.propagate = others, before


def _first(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "unknown error")
    return line if line.endswith(".") else f"{line}."
