#!/usr/bin/env python3
"""Compare the layers of two runs, saved as trees of .pt files: the GPU's and the compiled model's.

    python compare_gpu_neuron_outputs.py --gpu-path DIR --neuron-path DIR \\
        --layer-pattern "layer_*" --report-path DIR

Document 000's last command. Exit code 0: the trees were compared, however far apart they are, 2:
trouble. For a code that says whether a layer is out of the document's good ranges there is
`tensortap compare --preset device`.
"""

from __future__ import annotations

from pathlib import Path

from minimax import HERE
from minimax.command import COMPILED, DONE, TROUBLE, leave, note, parser


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--gpu-path",
        type=Path,
        default=COMPILED / "gpu_reference" / "full_model",
        metavar="DIR",
        help="the reference's tree (default: traced_model/gpu_reference/full_model)",
    )
    made.add_argument(
        "--neuron-path",
        type=Path,
        default=COMPILED / "test_layers" / "full_model",
        metavar="DIR",
        help="the tree to judge (default: traced_model/test_layers/full_model)",
    )
    made.add_argument(
        "--layer-pattern",
        default="layer_*",
        metavar="GLOB",
        help="which layers, by their files' names (default: layer_*)",
    )
    made.add_argument(
        "--report-path",
        type=Path,
        default=HERE / "comparison_reports",
        metavar="DIR",
        help="where comparison.json, .html and .txt go (default: comparison_reports)",
    )
    asked = made.parse_args()

    from minimax.compared import compare_trees, screen, write_reports

    compared = compare_trees(
        asked.gpu_path, asked.neuron_path, asked.layer_pattern, asked.report_path
    )
    for text in compared.warnings:
        note(f"warning: {text}")
    files = write_reports(compared, asked.report_path)
    print(screen(compared))
    for text in compared.comparison.notes:
        note(f"note: {text}")
    note(f"Reports: {', '.join(str(file) for file in files)}")
    return DONE if compared.comparison.compared else TROUBLE


if __name__ == "__main__":
    leave(main)
