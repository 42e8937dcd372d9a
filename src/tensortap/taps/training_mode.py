"""What in a model depends on training mode, and running a model in eval mode for a while."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from types import CodeType

import torch
from torch import nn

__all__ = ["in_eval", "is_random", "training_effects", "training_of"]

_DROPS = re.compile(r"drop|stochastic_?depth", re.IGNORECASE)
_SHARES = ("p", "prob", "rate")  # of what a layer is that drops values
_FUNCTION = re.compile(r"((feature_)?alpha_)?dropout[123]?d?")  # as in torch.nn.functional
_NOISE = re.compile(r"jitter", re.IGNORECASE)


def training_effects(model: object) -> dict[str, list[str]]:
    """The layers that now do something else than in eval mode, by what they do.

    Known are torch's own layers, and others by their attributes (running statistics, a share above
    zero under a name as `attention_dropout`) and by the code of their forward, where it hands
    `self.training` to a functional dropout.
    """
    found: dict[str, list[str]] = {}
    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            what = _effect(module)
            if what is not None:
                found.setdefault(what, []).append(name.replace("_orig_mod.", ""))
    return found


def training_of(model: object) -> bool | None:
    """Whether a module is in training mode; None of a frozen one and of other objects."""
    if not isinstance(model, nn.Module):  # it may answer to any name
        return None
    found: bool | None = getattr(model, "training", None)
    return found


def is_random(module: nn.Module) -> bool:
    """Whether a module now draws random numbers, which it does not in eval mode."""
    return _effect(module) in ("dropout", "noise")


def _effect(module: nn.Module) -> str | None:
    """What a module does because it is in training mode."""
    if not training_of(module):
        return None
    if isinstance(getattr(module, "running_mean", None), torch.Tensor):
        return "batch statistics"
    kind = getattr(module, "original_name", type(module).__name__)  # of a scripted module
    drops = _DROPS.search(kind) is not None
    shares = vars(module)
    if drops and isinstance(module, torch.jit.ScriptModule):
        shares = {name: getattr(module, name, None) for name in _SHARES}
    for name, value in shares.items():
        if not _is_share(value):
            continue
        if _DROPS.search(name) or (drops and name in _SHARES):
            alone = isinstance(module, nn.RNNBase) and module.num_layers == 1
            return None if alone else "dropout"  # an RNN drops between its layers
        if _NOISE.search(name):
            return "noise"
    if isinstance(module, nn.RReLU):
        return "noise"
    return "dropout" if _drops_in_code(module) else None


def _is_share(value: object) -> bool:
    return isinstance(value, float) and 0 < value <= 1


def _drops_in_code(module: nn.Module) -> bool:
    """Whether a module's own forward calls a functional dropout, with a rate above zero.

    The rate is an attribute of the module or of its config, or a number in the code, or left out.
    """
    if type(module).__module__.startswith("torch."):
        return False  # these hold their rates as attributes
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if not isinstance(code, CodeType) or "training" not in code.co_names:
        return False
    called = [name for name in code.co_names if _FUNCTION.fullmatch(name)]
    if not any(getattr(module, name, None) is None for name in called):
        return False  # a layer of its own, or a rate
    named = [name for name in code.co_names if _DROPS.search(name) and name not in called]
    holders = (module, getattr(module, "config", None))
    rates = [getattr(holder, name) for name in named for holder in holders if hasattr(holder, name)]
    if not rates:
        rates = [value for value in code.co_consts if isinstance(value, float)]
    return not rates or any(_is_share(rate) for rate in rates)


@contextlib.contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """A model in eval mode; afterwards each of its modules is in the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])  # a model may do more in it than set its flags
        for module, training in before:
            module.training = training
