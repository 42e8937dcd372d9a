"""What kind of error it is: simple hypotheses, fitted to the tensors."""

from .cause import Cause
from .explain import explain

__all__ = ["Cause", "explain"]
