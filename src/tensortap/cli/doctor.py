"""`tensortap doctor`: what is installed, and what does the arithmetic."""

from __future__ import annotations

from typing import Any

from .common import JsonOption, print_json, say

_EXTRAS = {
    "plot": ("matplotlib",),
    "hf": ("transformers", "accelerate"),
    "onnx": ("onnx", "onnxruntime"),
    "openvino": ("openvino",),
    "quant": ("torchao",),
}
_PURPOSES = {
    "plot": "pictures (plot)",
    "hf": "checkpoints (hf:DIR)",
    "onnx": "ONNX models (record model.onnx)",
    "openvino": "OpenVINO models (record model.xml)",
    "quant": "the modes int8, int8wo, int4wo, fp8, and quantised exported programs",
}
_PACKAGES = ("torch", "numpy", "safetensors", "rich", "typer")


def doctor(json: JsonOption = False) -> None:
    """Say which versions, backend, devices and extras are here."""
    facts = _examine()
    if json:
        print_json(facts)
        return
    numerics = facts["numerics"]
    for name, version in facts["versions"].items():
        say(f"{name:<14} {version or 'not installed'}")
    say(f"{'backend':<14} {numerics['backend']}: {numerics['why']}")
    say(f"{'isa':<14} {numerics['isa'] or '-'}")
    say(f"{'openmp':<14} {_yes(numerics['openmp'])}")
    say(f"{'threads':<14} {numerics['threads']}")
    say(f"{'layouts':<14} {', '.join(facts['layouts'])}")
    for name, extra in facts["extras"].items():
        what = ", ".join(f"{k} {v}" for k, v in extra["found"].items())
        if extra["missing"]:
            what = f"missing {', '.join(extra['missing'])}; install with: {extra['install']}"
        say(f"{'extra ' + name:<14} {what}; for {extra['purpose']}")
    devices = facts["cuda"]["devices"]
    for index, device in enumerate(devices):
        say(f"{f'cuda:{index}':<14} {device['name']}, {device['memory_gib']:.0f} GiB")
    if not devices:
        say(f"{'cuda':<14} no device")


def _examine() -> dict[str, Any]:
    import platform

    import torch

    from .. import __version__
    from ..numerics import backend
    from ..recording import layouts

    return {
        "versions": {
            "tensortap": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
            "torch": torch.__version__,  # with the build, which the package metadata lacks
        },
        "platform": platform.platform(),
        "numerics": backend.describe(),
        "layouts": layouts.names(),
        "extras": {name: _extra(name, packages) for name, packages in _EXTRAS.items()},
        "cuda": _cuda(),
    }


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _extra(name: str, packages: tuple[str, ...]) -> dict[str, Any]:
    found = {package: version for package in packages if (version := _version(package))}
    return {
        "found": found,
        "missing": [package for package in packages if package not in found],
        "install": f"pip install 'tensortap[{name}]'",
        "purpose": _PURPOSES[name],
    }


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"version": torch.version.cuda, "devices": []}
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.version.cuda,
        "devices": [
            {"name": p.name, "memory_gib": p.total_memory / 2**30, "capability": [p.major, p.minor]}
            for p in properties
        ],
    }


def _yes(value: object) -> str:
    return "-" if value is None else "yes" if value else "no"
