"""The wrapper: callbacks, saving at each epoch's end, hooks gone on every way out."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from monitor_models import batches, files, hooks_of, no_warnings, small

import tensortap as tap
from tensortap.errors import OptionError

FULL = {"record_type": "epoch_full"}


@pytest.fixture
def built(tmp_path):
    model = small()
    monitor = tap.Monitor(model, {"head": {**FULL}, "layers.0": {}}, [1, 2], tmp_path / "out", [0])
    yield model, monitor, tmp_path / "out"
    monitor.remove_hooks()


def loop(model, epoch_callback, batch_callback, epochs=2, after=lambda epoch: None):
    for epoch in range(1, epochs + 1):
        if epoch_callback:
            epoch_callback(epoch)
        for index, batch in enumerate(batches()):
            if batch_callback:
                batch_callback(index)
            model(batch).sum().backward()
        after(epoch)
    return "trained"


EXPECTED = [
    "epoch_head_epoch1.pt",
    "epoch_head_epoch2.pt",
    "single_layers.0_epoch1_batch0.pt",
    "single_layers.0_epoch2_batch0.pt",
]


def test_the_documents_function(built) -> None:
    """It takes **kwargs, and looks for its callbacks there."""
    model, monitor, out = built
    seen = []

    def encapsulated_train(config, device, **kwargs):
        """Trains."""
        return loop(
            model,
            kwargs.get("epoch_callback"),
            kwargs.get("batch_callback"),
            after=lambda epoch: seen.append(files(out)),
        )

    monitored = tap.MonitoredTrainer(monitor).wrap_training_function(encapsulated_train)
    assert monitored.__name__ == "encapsulated_train" and monitored.__doc__ == "Trains."
    with no_warnings():
        assert monitored({"a": 1}, device="cpu") == "trained"
    assert seen == [[], EXPECTED[::2]], "an epoch is saved when the next begins"
    assert files(out) == EXPECTED
    assert hooks_of(model) == 0 and monitor.closed
    assert tap.open(out).manifest.status == "complete"


class Trainer:
    def __init__(self, model) -> None:
        self.model = model

    def fit(self, epoch_callback=None, *, batch_callback=None):
        return loop(self.model, epoch_callback, batch_callback)

    def __call__(self, epochs, batch_callback, epoch_callback):
        return loop(self.model, epoch_callback, batch_callback, epochs)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: (Trainer(model).fit, ()),
        lambda model: (Trainer(model), (2,)),
        lambda model: (functools.partial(Trainer(model), 2), ()),
        lambda model: (functools.partial(loop, model), ()),
        lambda model: (lambda **kwargs: loop(model, **kwargs), ()),
    ],
    ids=["method", "object", "partial object", "partial", "lambda"],
)
def test_every_kind_of_callable(built, make) -> None:
    model, monitor, out = built
    fn, args = make(model)
    with no_warnings():
        assert tap.MonitoredTrainer(monitor).wrap_training_function(fn)(*args) == "trained"
    assert files(out) == EXPECTED


def test_the_callers_own_callbacks_are_called_too(built) -> None:
    model, monitor, out = built
    seen: list = []
    fn = functools.partial(loop, model, epochs=1, batch_callback=lambda b: seen.append(("p", b)))
    wrapped = tap.MonitoredTrainer(monitor).wrap_training_function(fn)
    wrapped(lambda e: seen.append(("e", e)))
    assert seen == [("e", 1), ("p", 0), ("p", 1), ("p", 2)]
    assert files(out) == EXPECTED[::2]


def test_callbacks_that_come_first(built) -> None:
    """The caller calls the function as if it took none; models can be called, and are none."""
    model, monitor, out = built

    def fit(epoch_callback, batch_callback, network, epochs, rate=0.1):
        assert network is model and rate == 0.5
        return loop(network, epoch_callback, batch_callback, epochs)

    wrapped = tap.MonitoredTrainer(monitor).wrap_training_function(fit)
    assert wrapped(model, 2, rate=0.5) == "trained"
    assert files(out) == EXPECTED


@pytest.mark.parametrize(
    ("args", "kwargs", "got"),
    [
        ((3,), {}, (3, 1, ())),
        ((3, 4), {}, (3, 4, ())),
        ((3, 4, 5), {}, (3, 4, (5,))),
        ((3, None, None, 4), {}, (3, 4, ())),
        ((3,), {"n": 4}, (3, 4, ())),
        ((), {"n": 4, "a": 3}, (3, 4, ())),
        ((3, 4), {"batch_callback": print}, (3, 4, ())),
        ((None,), {}, (None, 1, ())),
    ],
)
def test_positions_are_for_the_other_parameters(built, args, kwargs, got) -> None:
    _, monitor, _ = built

    def fit(a, epoch_callback, batch_callback, n=1, *more):
        assert callable(epoch_callback) and callable(batch_callback)
        epoch_callback(1)
        return a, n, more

    assert tap.MonitoredTrainer(monitor).wrap_training_function(fit)(*args, **kwargs) == got
    assert monitor.current_epoch == 1


def test_nothing_that_was_given_vanishes(built) -> None:
    _, monitor, _ = built

    def fit(n, epoch_callback=None, batch_callback=None):
        return n

    with pytest.raises(TypeError, match="positional arguments"):
        tap.MonitoredTrainer(monitor).wrap_training_function(fit)(3, 5)


def test_a_function_that_returns_before_training_is_over(built) -> None:
    model, monitor, out = built

    def steps(epoch_callback, batch_callback):
        yield loop(model, epoch_callback, batch_callback)

    wrapped = tap.MonitoredTrainer(monitor).wrap_training_function(lambda **kw: steps(**kw))
    with pytest.warns(tap.TapWarning, match="returned a generator, before training was over"):
        found = wrapped()
    assert list(found) == ["trained"] and hooks_of(model) > 0
    monitor.remove_hooks()
    assert files(out) == EXPECTED


def test_callbacks_given_by_name(built) -> None:
    model, monitor, out = built
    seen: list = []

    def fit(**kwargs):
        return loop(model, **kwargs)

    wrapped = tap.MonitoredTrainer(monitor).wrap_training_function(fit)
    wrapped(epoch_callback=seen.append, batch_callback=None)
    assert seen == [1, 2] and files(out) == EXPECTED


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_hooks_go_on_every_exception(built, error) -> None:
    model, monitor, out = built

    def fails(epoch_callback, batch_callback):
        loop(model, epoch_callback, batch_callback, 1)
        raise error("enough")

    wrapped = tap.MonitoredTrainer(monitor).wrap_training_function(fails)
    with pytest.raises(error, match="enough"):
        wrapped()
    assert hooks_of(model) == 0
    assert files(out) == EXPECTED[::2]
    manifest = tap.open(out, partial=True).manifest
    assert manifest.failure == f"the run raised {error.__name__}: enough"


def test_wrong_arguments_leave_no_hook(built) -> None:
    model, monitor, _ = built
    wrapped = tap.MonitoredTrainer(monitor).wrap_training_function(Trainer(model))
    with pytest.raises(TypeError):
        wrapped(1, 2, 3, 4, 5)
    assert hooks_of(model) == 0


def test_functions_that_take_neither_are_refused(built) -> None:
    model, monitor, _ = built
    trainer = tap.MonitoredTrainer(monitor)

    def plain(config, device):
        return None

    def positional(epoch_callback, batch_callback, /):
        return None

    for fn in (plain, positional, lambda: None, functools.partial(plain, 1)):
        with pytest.raises(OptionError, match="takes neither epoch_callback nor batch_call") as why:
            trainer.wrap_training_function(fn)
        assert "run it inside 'with monitor:'" in str(why.value)
    with pytest.raises(ValueError, match="takes a function, got 3"):
        trainer.wrap_training_function(3)

    def steps(epoch_callback):
        yield 1

    async def later(epoch_callback):
        return 1

    for fn, kind in ((steps, "generator"), (later, "coroutine")):
        with pytest.raises(OptionError, match=f"is a {kind}"):
            trainer.wrap_training_function(fn)
    with pytest.raises(OptionError, match="takes a Monitor, got None"):
        tap.MonitoredTrainer(None)
    assert hooks_of(model) > 0, "refusing takes nothing away"


def test_a_function_that_takes_one(built) -> None:
    model, monitor, out = built

    def fit(epoch_callback):
        return loop(model, epoch_callback, None)

    with pytest.warns(tap.TapWarning, match="takes no batch_callback: batches are counted"):
        wrapped = tap.MonitoredTrainer(monitor).wrap_training_function(fit)
    with pytest.warns(tap.TapWarning, match="set_batch_idx was not called"):
        wrapped()
    assert files(out) == EXPECTED

    with pytest.warns(tap.TapWarning, match="takes no epoch_callback: call monitor.set_epoch"):
        tap.MonitoredTrainer(monitor).wrap_training_function(lambda batch_callback: None)


def test_a_second_run_is_said_not_to_be_recorded(built) -> None:
    model, monitor, out = built
    wrapped = tap.MonitoredTrainer(monitor).wrap_training_function(Trainer(model).fit)
    wrapped()
    with pytest.warns(tap.TapWarning, match="this run is not recorded"):
        assert wrapped() == "trained"
    assert files(out) == EXPECTED


def test_a_function_that_saves_and_removes_itself(built) -> None:
    """The document's first way, inside the second."""
    model, monitor, out = built

    def encapsulated_train(**kwargs):
        def end(epoch):
            monitor.save_single_outputs()
            monitor.save_epoch_outputs()
            monitor.clear_current_epoch_data()

        loop(model, after=end, **kwargs)
        monitor.remove_hooks()
        return 3

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tap.MonitoredTrainer(monitor).wrap_training_function(encapsulated_train)() == 3
    assert files(out) == EXPECTED
    assert torch.load(out / EXPECTED[0], weights_only=True)["output"].shape == (12, 5, 2)
