"""Published JSON schemas, made strict: a key that no schema describes fails too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

__all__ = ["validate"]

DOCS = Path(__file__).resolve().parent.parent / "docs"


def validate(data: Any, name: str) -> None:
    """Check a document against docs/NAME.schema.json."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((DOCS / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, _strict(schema))


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: _strict(value) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and node.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made
