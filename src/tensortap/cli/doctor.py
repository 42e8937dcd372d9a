"""`tensortap doctor`: what is installed, and what does the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
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
    if numerics["cuda"] is not None:
        say(f"{'on cuda':<14} {numerics['cuda']['backend']}: {numerics['cuda']['why']}")
    say(f"{'isa':<14} {numerics['isa'] or '-'}")
    say(f"{'openmp':<14} {_yes(numerics['openmp'])}")
    say(f"{'threads':<14} {numerics['threads']}")
    say(f"{'layouts':<14} {', '.join(facts['layouts'])}")
    for name, extra in facts["extras"].items():
        what = ", ".join(f"{k} {v}" for k, v in extra["found"].items())
        if extra["missing"]:
            what = f"missing {', '.join(extra['missing'])}; install with: {extra['install']}"
        say(f"{'extra ' + name:<14} {what}; for {extra['purpose']}")
    cuda = facts["cuda"]
    for index, device in enumerate(cuda["devices"]):
        room = f"{device['memory_gib']:.0f} GiB, {device['free_gib']:.0f} free"
        say(f"{f'cuda:{index}':<14} {device['name']}, {room}")
    if not cuda["devices"]:
        say(f"{'cuda':<14} no device: {cuda['why']}")
    for name, purpose in (("triton", "kernels"), ("pinned", "copies from pinned memory")):
        part = cuda[name]
        version = f"{part['version']}, " if part.get("version") else ""
        if part["works"] is not None:
            state = "work" if part["works"] else f"do not work: {part['why']}"
            say(f"{name:<14} {version}{purpose} {state}")


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

    from ..targets.options import missing_cuda

    why = missing_cuda(torch.device("cuda"))
    triton = _version("triton")
    if why:
        absent = {"works": None, "why": "there is no CUDA device"}
        return {
            "version": torch.version.cuda,
            "devices": [],
            "why": why,
            "triton": {"version": triton, **absent},
            "pinned": absent,
        }
    return {
        "version": torch.version.cuda,
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "why": "",
        "triton": {"version": triton, **_attempt(_kernels)},
        "pinned": _attempt(_pinned),
    }


def _device(index: int) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "memory_gib": found.total_memory / 2**30,
        "free_gib": torch.cuda.mem_get_info(index)[0] / 2**30,
        "capability": [found.major, found.minor],
    }


def _attempt(part: Callable[[], str]) -> dict[str, Any]:
    """Whether a part works; it says why not, or fails."""
    try:
        why = part()
    except Exception as error:  # whatever it is, it is what the user wants to know
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return {"works": not why, "why": why}


def _kernels() -> str:
    """Why no kernel of ours sums up a tensor on the device; empty where one does."""
    import torch

    from ..numerics.device import empty_rows

    try:
        from ..numerics import triton_summary
    except ImportError as error:
        return f"{error}. CUDA tensors are summed up by torch alone, which is slower"
    values = torch.arange(1000.0, device="cuda")
    row = empty_rows(1, values.device)[0]
    if not triton_summary.accumulate(values, row):
        return "the kernels do not take a plain float32 tensor"
    found = row.cpu()
    return (
        "" if found[0] == 1000 and abs(found[7] - 499.5) < 1e-6 else "a kernel gives wrong numbers"
    )


def _pinned() -> str:
    """Why a copy from pinned memory is not what was copied; empty where it is."""
    import torch

    given = torch.arange(1 << 16).pin_memory()
    there = given.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    return "" if torch.equal(there.cpu(), given) else "what came over is not what was sent"


def _yes(value: object) -> str:
    return "-" if value is None else "yes" if value else "no"
