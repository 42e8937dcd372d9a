"""Two checkpoints compared before anything runs: their weights and their configs."""

from .compare import compare_weights
from .results import WeightComparison, WeightRow

__all__ = ["WeightComparison", "WeightRow", "compare_weights"]
