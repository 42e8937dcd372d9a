"""Somebody who reads document 000 beside a copy of recipes/minimax_m2, and types its commands."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "minimax_m2"

# The document's commands, word for word.
COMPILE = r"""
cd /home/ubuntu/neuronx-distributed-inference/examples

# 编译模型（只需要做一次）
python minimax_m2_misc/test_layer_by_layer.py --test-type full
"""

SKIP_COMPILE = r"""
python minimax_m2_misc/test_layer_by_layer.py --test-type full --skip-compile
"""

ON_GPU = r"""
# 在GPU机器上
python minimax_m2_misc/test_layer_by_layer_gpu.py --test-type extract-all
"""

WORKFLOW = r"""
# 1. 编译模型（第一次运行）
python minimax_m2_misc/test_layer_by_layer.py --test-type full

# 2. 运行推理并记录所有层输出
python minimax_m2_misc/test_layer_by_layer.py --test-type full --skip-compile

# 3. 分析输出（Python脚本）
python <<EOF
import torch

# 加载元数据
metadata = torch.load('/home/ubuntu/traced_model/test_layers/full_model/metadata.pt')
stats = metadata['statistics']

# 打印所有层的摘要
print("所有层统计摘要:\n")
for layer_name in sorted(stats.keys()):
    if 'layer_' in layer_name:
        stat = stats[layer_name]
        status = "✓" if not stat.get('has_nan') and not stat.get('has_inf') else "✗"
        print(f"{status} {layer_name:15s} Mean={stat['mean']:8.4f} Std={stat['std']:8.4f}")
EOF

# 4. 与GPU版本对比（如果有的话）
python compare_gpu_neuron_outputs.py \
  --gpu-path /home/ubuntu/traced_model/gpu_reference/full_model \
  --neuron-path /home/ubuntu/traced_model/test_layers/full_model \
  --layer-pattern "layer_*" \
  --report-path /home/ubuntu/comparison_reports/
"""

# Steps 1 and 2 are one session in a shell. It begins with the same command as the workflow, and
# compiling takes long: that one is not run twice.
BLOCKS = (ON_GPU, WORKFLOW, COMPILE.partition("\n\n")[0] + SKIP_COMPILE)

_TENSORTAP = """#!/usr/bin/env python3
from tensortap.cli.main import main
main()
"""


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


class Reader:
    """`minimax_m2_misc/` is the copy of the recipe's folder, and `/home/ubuntu/` lies there too."""

    def __init__(self, folder: Path, warm: WarmPython) -> None:
        self.folder = folder
        self.document: dict[str, Ran] = {}
        ignored = shutil.ignore_patterns("__pycache__", "traced_model", "comparison_reports")
        shutil.copytree(RECIPE, folder, ignore=ignored, dirs_exist_ok=True)
        (folder / "neuronx-distributed-inference" / "examples").mkdir(parents=True, exist_ok=True)
        command = folder / "bin" / "tensortap"
        command.parent.mkdir(exist_ok=True)
        command.write_text(_TENSORTAP)
        command.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{command.parent}:{warm.path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "TENSORTAP_TINY": "1",
            "MPLBACKEND": "Agg",
            "NO_COLOR": "1",
        }

    @classmethod
    def of_the_document(cls, folder: Path, warm: WarmPython, shelf: Path) -> Reader:
        """One who has typed all of the document; `shelf` is where the workers' first one did."""
        shelf.mkdir(exist_ok=True)
        with (shelf / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            told = shelf / "ran.json"
            if not told.exists():
                first = cls(shelf / "minimax_m2", warm)
                ran = {block: asdict(first.type(block)) for block in BLOCKS}
                told.write_text(json.dumps(ran))
        shutil.copytree(shelf / "minimax_m2", folder)
        reader = cls(folder, warm)
        reader.document = {block: Ran(**ran) for block, ran in json.loads(told.read_text()).items()}
        return reader

    @property
    def compiled(self) -> Path:
        """The tree of the compiled model."""
        return self.folder / "traced_model" / "test_layers" / "full_model"

    @property
    def gpu(self) -> Path:
        """The tree of the eager model."""
        return self.folder / "traced_model" / "gpu_reference" / "full_model"

    def read(self, text: str) -> str:
        """The document's text with its two folders where they are here."""
        return text.replace("minimax_m2_misc/", f"{self.folder}/").replace(
            "/home/ubuntu/", f"{self.folder}/"
        )

    def type(self, text: str, environment: Mapping[str, str] | None = None) -> Ran:
        """A block of shell commands, in the recipe's folder; the first that fails ends it."""
        done = subprocess.run(
            ["bash", "-e", "-c", self.read(text)],
            cwd=self.folder,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=240,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def python(self, snippet: str) -> Ran:
        """A snippet of Python, in a process of its own."""
        return self.type(f"python <<'END OF SNIPPET'\n{self.read(snippet)}\nEND OF SNIPPET")

    def tensortap(self, words: str) -> Ran:
        """A command of ours."""
        return self.type(f"tensortap {words}")


def bare_python(words: list[str], folder: Path) -> Ran:
    """A real process, without the warm interpreter, and with nothing on its path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    return Ran(done.returncode, done.stdout, done.stderr)
