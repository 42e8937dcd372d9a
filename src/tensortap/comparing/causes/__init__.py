"""What kind of error it is: simple hypotheses, fitted to the tensors."""

from .cause import Cause

__all__ = ["Cause"]
