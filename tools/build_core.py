"""Build the compiled core in place, so that PYTHONPATH=src uses it.

Needs a C++ compiler and, in the running Python, cmake, ninja and nanobind. Downloads nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nanobind

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tensortap" / "native"


def tool(name: str) -> str:
    """The tool of this Python's environment, else the one on the PATH."""
    own = Path(sysconfig.get_path("scripts")) / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed: pip install {name}")
    return found


def main() -> None:
    build = ROOT / "build" / f"inplace-{sys.implementation.cache_tag}"
    cmake, ninja = tool("cmake"), tool("ninja")
    configure = [
        *(cmake, "-S", str(SOURCE), "-B", str(build), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
    ]
    subprocess.run(configure, check=True)
    subprocess.run([cmake, "--build", str(build)], check=True)
    (library,) = build.glob("_core*.so")
    target = SOURCE.parent / library.name
    partial = target.with_suffix(".partial")  # renamed over: a running process keeps its own copy
    shutil.copy2(library, partial)
    partial.replace(target)
    print(f"built {target.relative_to(ROOT)}")  # noqa: T201


if __name__ == "__main__":
    main()
