"""What recording costs on a GPU: `python benchmarks/gpu.py`, under 8 minutes on an H200.

A Llama of 62 layers (hidden 3072, 6.3 B parameters, bf16, random weights) runs forward, plain and
recorded in turns: with tensors and with summaries, with the ways that people write by hand and the
floors beside ours; then compiled and in CUDA graphs, the kernels alone, a training with a watch,
and a comparison of two recordings.

    python benchmarks/gpu.py --json gpu.json            # all of it
    python benchmarks/gpu.py --only kernels summaries   # parts of it
    python benchmarks/gpu.py --tiny                     # the same code, small, on any device
    python benchmarks/gpu.py --from gpu.json --page docs/benchmarks.md   # paste, run nothing

Everything is a ratio within one run: variants take turns in shuffled order, the numbers are medians
of the ratios within rounds, with quartiles. A forward is timed until the device is done.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import tensortap as tap
from gpu_page import as_json, markdown, merged, paste, text
from gpu_parts import Setting, Table, why

PARTS = {
    "recording": ("gpu_tensors", "recording"),
    "summaries": ("gpu_summaries", "summaries"),
    "kernels": ("gpu_kernels", "kernels"),
    "difference": ("gpu_kernels", "differences"),
    "compiled": ("gpu_compiled", "compiled"),
    "watch": ("gpu_training", "watching"),
    "compare": ("gpu_comparing", "comparing"),
}


def where(setting: Setting) -> dict[str, str]:
    """Which machine and which versions."""
    name = torch.cuda.get_device_name() if setting.cuda else "CPU"
    try:
        own = version("triton")
    except PackageNotFoundError:
        own = "none"
    cores = os.cpu_count()
    model = "a tiny model" if setting.tiny else "62 layers, hidden 3072, 6.3 B parameters, bf16"
    return {
        "device": name,
        "host": f"{cores} cores, {_cpu()}",
        "torch": torch.__version__,
        "triton": own,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "when": datetime.now(timezone.utc).date().isoformat(),
        "model": model,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def run_part(name: str, setting: Setting) -> list[Table]:
    """One part; what goes wrong in it is a table that says so, and no end of the others."""
    module, function = PARTS[name]
    try:
        part = importlib.import_module(module)
        gc.freeze()  # modules and classes stay: collecting between rounds need not look at them
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("once", module="tensortap")  # ours say what a number means
            warnings.filterwarnings("once", category=tap.TapWarning)
            found: list[Table] = getattr(part, function)(setting)
    except Exception as error:
        traceback.print_exc()
        return [Table(name, (), (), (f"not available: {why(error)}",))]
    finally:
        gc.unfreeze()
        gc.collect()
        if setting.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    said = tuple(dict.fromkeys(f"Warning: {str(one.message).splitlines()[0]}" for one in heard))
    return [replace(found[0], notes=(*found[0].notes, *said)), *found[1:]]


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not options.tiny:
        sys.exit("This needs a CUDA device. On a CPU, --tiny runs the same code on a tiny model.")
    scratch = Path(tempfile.mkdtemp(prefix="tensortap-gpu-", dir=options.disk))
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else scratch
    memory = Path(tempfile.mkdtemp(prefix="tensortap-gpu-", dir=shared))
    only = tuple(name.replace("x", " x ") for name in options.shapes or ())
    setting = Setting(device, options.tiny, scratch, memory, only, options.pace)
    result: dict[str, Any] = {"where": where(setting), "parts": {}, "seconds": {}}
    try:
        for name in options.only or PARTS:
            start = time.perf_counter()
            tables = run_part(name, setting)
            result["parts"][name] = [as_json(table) for table in tables]
            result["seconds"][name] = time.perf_counter() - start
            if not options.markdown:
                for table in tables:
                    print(text(table), flush=True)
            print(f"{name}: {result['seconds'][name]:.1f} s", file=sys.stderr, flush=True)
            if options.json is not None:  # after every part, lest a later one end it all
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--shapes", nargs="+", help="of forwards, such as 1x128; else all three")
    parser.add_argument(
        "--pace",
        type=float,
        default=0.33,
        help="how long to measure: 0.33, or 1 for three times that",
    )
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to record to")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--from", dest="source", type=Path, nargs="+", help="of these files")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.source:
        result = merged([json.loads(path.read_text()) for path in options.source])
    else:
        result = run(options)
    if options.markdown:
        print(markdown(result))
    if options.page is not None:
        paste(options.page, result)


if __name__ == "__main__":
    main()
