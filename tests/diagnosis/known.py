"""What the library is known to miss: shown by the bench, not asked by the tests.

A line leaves this list when it is mended.
"""

from __future__ import annotations

__all__ = ["KNOWN"]

KNOWN: frozenset[str] = frozenset(
    (
        "bare, final bias lost (bare), middle",
        "bert, 10 % gain, middle, int8 weights",
        "blip, epsilon of the eye (blip), middle",
        "blip, quick gelu in the eye (blip), middle",
        "demo, wrong mask, middle, int8 weights",
        "denoiser, epsilon (denoiser), middle",
        "experts, shared gate lost (experts), middle",
        "gemma2, attention cap lost (gemma2), middle",
        "graph, maximum for mean (graph), middle",
        "graph, residual lost (graph), middle",
        "lstm, second direction lost (lstm), middle",
        "mamba, 10 % gain, middle, bf16",
        "qwen3_moe, keys not turned (qwen3_moe), middle",
        "qwen3_moe, top 1 for top 2 (qwen3_moe), middle",
        "recommender, epsilon of a tower (recommender), middle",
        "siamese, second not normalised (siamese), middle",
        "waves, last skip alone (waves), middle",
        "waves, tanh and sigmoid exchanged (waves), middle",
    )
)
