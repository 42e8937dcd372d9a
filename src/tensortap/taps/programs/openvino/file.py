"""The two files of an OpenVINO model, looked at before OpenVINO opens them.

The XML is read by a parser that is told to resolve nothing: a document type, and with it every
entity, is refused. What it says of the .bin file is checked, since OpenVINO maps it into memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.parsers import expat

from ....errors import TargetError

__all__ = ["looks_like", "open_file"]

_HEAD = 1 << 16
_MOST = 1 << 30  # bytes of XML; the largest models have some ten million


class _Refused(Exception):
    """Why the XML is read no further."""


class _Reader:
    """The root element, and how many bytes of weights the file claims."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.version: str | None = None
        self.claimed = 0
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self._start
        self._parser.StartDoctypeDeclHandler = self._doctype
        self._parser.EntityDeclHandler = self._doctype

    def feed(self, text: bytes, last: bool) -> None:
        self._parser.Parse(text, last)

    def _doctype(self, *_: Any) -> None:
        raise _Refused("it declares a document type, which OpenVINO never writes")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if self.root is None:
            self.root = name
            self.version = attributes.get("version")
        if name == "data" and "offset" in attributes and "size" in attributes:
            try:
                offset, size = int(attributes["offset"]), int(attributes["size"])
            except ValueError:
                return  # an operation's own attributes of these names
            if offset < 0 or size < 0:
                raise _Refused("a constant claims a place before the start of the .bin file")
            self.claimed = max(self.claimed, offset + size)


def looks_like(path: Path) -> bool:
    """Whether a file is XML whose root is <net>."""
    reader = _Reader()
    try:
        with path.open("rb") as file:
            reader.feed(file.read(_HEAD), False)
    except (OSError, expat.ExpatError, _Refused):
        return False
    return reader.root == "net"


def open_file(path: Path) -> Any:
    """The `openvino.Model` of an .xml file whose .bin lies beside it."""
    import openvino

    reader = _read(path)
    weights = path.with_suffix(".bin")
    if reader.claimed:
        if not weights.is_file():
            raise TargetError(
                f"The weights of '{path}' are missing: expected '{weights.name}' beside it. Copy "
                "both files that openvino.save_model wrote."
            )
        size = weights.stat().st_size
        if size < reader.claimed:
            raise TargetError(
                f"'{weights}' is too short: '{path.name}' claims {reader.claimed} bytes of "
                f"weights, the file has {size}. It was cut off, or belongs to another model."
            )
    try:
        return openvino.Core().read_model(path)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise TargetError(
            f"OpenVINO {openvino.__version__} cannot read '{path}': {lines[-1] if lines else error}"
        ) from error


def _read(path: Path) -> _Reader:
    reader = _Reader()
    try:
        size = path.stat().st_size
        if size > _MOST:
            raise TargetError(
                f"'{path}' has {size} bytes; an OpenVINO .xml of more than {_MOST} is not read."
            )
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                reader.feed(block, False)
            reader.feed(b"", True)
    except OSError as error:
        raise TargetError(f"Cannot read '{path}': {error.strerror or error}.") from error
    except expat.ExpatError as error:
        raise TargetError(
            f"'{path}' is no well-formed XML ({error}): it was cut off, or is no OpenVINO model. "
            "Copy it again, or write it again with openvino.save_model."
        ) from error
    except _Refused as why:
        raise TargetError(f"'{path}' is not read: {why}.") from None
    if reader.root != "net":
        raise TargetError(
            f"'{path}' is no OpenVINO model: its root element is <{reader.root}>, expected <net>. "
            "Write one with openvino.save_model."
        )
    return reader
