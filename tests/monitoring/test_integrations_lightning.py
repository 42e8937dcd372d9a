"""The Lightning callback under the real trainer."""

from __future__ import annotations

import csv
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tensortap as tap
from support import Net

pl = pytest.importorskip("lightning.pytorch")

from tensortap.errors import OptionError  # noqa: E402
from tensortap.monitoring.integrations import TapCallback  # noqa: E402

WIDTH = 8
BATCHES = 8  # of two samples, an epoch


class Module(pl.LightningModule):
    """A net that writes down what its optimizer really sees."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(blocks=2, width=WIDTH)
        self.fail_at = fail_at
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.outputs: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.fail_at is not None and batch_idx == self.fail_at:
            raise RuntimeError("the loader is cursed")
        loss = self._loss(batch)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.net(batch)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.stack(grads).norm().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    data = torch.randint(0, 16, (2 * BATCHES, 4), generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2)


def trainer(*callbacks: Any, **options: Any) -> Any:
    settings = {"accelerator": "cpu", "logger": False, "max_epochs": 2, **options}
    settings = {"enable_checkpointing": False, "enable_model_summary": False, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pl.Trainer(
            callbacks=list(callbacks),
            enable_progress_bar=False,
            accumulate_grad_batches=2,
            **settings,
        )


def fit(run: Any, module: Module, *loaders: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
        warnings.filterwarnings("ignore", category=FutureWarning)
        torch.manual_seed(2)
        run.fit(module, *(loaders or (loader(),)))


def hooks(module: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in module.modules()
    )


def records(run: tap.Recording, **wanted: str) -> list[tap.Record]:
    return [r for r in run.records if all(getattr(r, k) == v for k, v in wanted.items())]


def test_it_watches_a_fit(tmp_path) -> None:
    module, plain = Module(), Module()
    before = hooks(module)
    callback = TapCallback(tmp_path / "run", every=1)
    fit(trainer(callback), module, loader(), loader())
    fit(trainer(), plain, loader(), loader())
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert module.losses == plain.losses
    assert hooks(module) == before
    assert callback.watcher.failure is None

    run = tap.open(tmp_path / "run")
    assert run.status == "complete"
    block = records(run, layer="net.blocks.1", port="output")
    # 4 steps in each of 2 epochs, 2 micro-batches each; validation is not among them.
    assert [(r.epoch, r.batch, r.call) for r in block] == [
        (step // 4, step, call) for step in range(8) for call in range(2)
    ]
    assert len(records(run, layer="net.blocks.1", port="grad_output")) == 16


def test_gradients_are_those_that_the_optimizer_sees(tmp_path) -> None:
    module = Module()
    fit(trainer(TapCallback(tmp_path / "run", every=1), gradient_clip_val=0.5), module)
    run = tap.open(tmp_path / "run")
    found = [0.0] * 8
    for record in records(run, port="grad_param"):
        found[record.batch] += record.summary.l2**2
    # Lightning calls its hook before it clips.
    expected = [min(norm, 0.5) for norm in module.norms]
    assert [value**0.5 for value in found] == pytest.approx(expected, rel=1e-4)


def test_what_the_module_logs_stands_with_its_step(tmp_path) -> None:
    module = Module()
    fit(trainer(TapCallback(tmp_path / "run", every=1)), module, loader(), loader())
    run = tap.open(tmp_path / "run")
    losses = {r.batch: r.summary.mean for r in records(run, layer="loss", port="scalar")}
    assert {step: losses[step] for step in range(8)} == pytest.approx(
        {step: module.losses[2 * step + 1] for step in range(8)}
    )
    validated = {r.batch for r in records(run, layer="val_loss", port="scalar")}
    assert validated == {3, 7}  # after each epoch, with its last step


def test_numbers_go_to_the_loggers_of_the_trainer(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tb")]
    got: list[int] = []
    callback = TapCallback(
        tmp_path / "run", every=2, to_logger=True, sinks=lambda values, step: got.append(step)
    )
    fit(trainer(callback, logger=loggers, log_every_n_steps=1), Module())
    assert got == [0, 2, 4, 6]
    name = "tensortap/output/net.blocks.0/rms"
    (table,) = (tmp_path / "csv").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(table.open()) if row[name]]
    assert [int(row["step"]) for row in rows] == got
    assert all(row["tensortap/output/net.blocks.0/nan"] == "0.0" for row in rows)
    assert "tensortap/loss" not in rows[0]  # the module has logged that itself
    (folder,) = (path.parent for path in (tmp_path / "tb").rglob("events.out.*"))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars(name)] == got
    assert events.Scalars("tensortap/grad_norm")


def test_an_exception_closes_the_recording_and_leaves_no_hook(tmp_path) -> None:
    module = Module(fail_at=5)
    before = hooks(module)
    with pytest.raises(RuntimeError, match="cursed"):
        fit(trainer(TapCallback(tmp_path / "run", every=1)), module)
    assert hooks(module) == before
    run = tap.open(tmp_path / "run")
    assert run.status == "failed"
    assert run.manifest.failure == "training raised RuntimeError: the loader is cursed"
    assert {r.batch for r in records(run, port="grad_param")} == {0, 1}
    last = [r.call for r in records(run, layer="net.blocks.0", port="output") if r.batch == 2]
    assert last == [0]  # what the step that broke had come to


def test_a_rule_that_raises_ends_the_fit(tmp_path) -> None:
    module = Module()
    before = hooks(module)
    weights = [p.clone() for p in module.parameters()]
    callback = TapCallback(tmp_path / "run", every=1, rules={"grad_norm > 0": "raise"})
    with pytest.raises(tap.TapError, match="grad_norm"):
        fit(trainer(callback), module)
    assert hooks(module) == before
    assert tap.open(tmp_path / "run").status == "failed"
    # It was raised between the closure and the step: no weight has moved.
    assert all(torch.equal(p, w) for p, w in zip(module.parameters(), weights, strict=True))


def test_checkpoints_are_written_and_resumed_from(tmp_path) -> None:
    module = Module()
    saving = pl.callbacks.ModelCheckpoint(tmp_path, "model", every_n_epochs=2, save_top_k=1)
    callback = TapCallback(tmp_path / "run", every=1)
    fit(trainer(callback, saving, enable_checkpointing=True), module)  # saved while watched
    saved = torch.load(tmp_path / "model.ckpt", weights_only=False)
    assert saved["state_dict"].keys() == module.state_dict().keys()
    again = trainer(TapCallback(tmp_path / "again", every=1), max_epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.fit(Module(), loader(), ckpt_path=tmp_path / "model.ckpt")
    found = records(tap.open(tmp_path / "again"), layer="net.blocks.0", port="output")
    assert {(r.epoch, r.batch) for r in found} == {(2, step) for step in range(8, 12)}


def test_a_second_fit_goes_to_a_folder_beside_the_first(tmp_path) -> None:
    callback = TapCallback(tmp_path / "run", every=1)
    for _ in range(2):
        fit(trainer(callback, max_epochs=1), Module())
    assert tap.open(tmp_path / "run").status == "complete"
    assert tap.open(tmp_path / "run-2").status == "complete"


def test_options_are_checked_when_it_is_made() -> None:
    with pytest.raises(OptionError, match=r"no option 'evry'.*every"):
        TapCallback("runs/never", evry=2)
    assert not Path("runs/never").exists()


def test_it_suits_the_library_under_its_other_name(tmp_path, monkeypatch) -> None:
    """Each trainer knows its own Callback alone, and both may be in use."""
    other = pytest.importorskip("pytorch_lightning")
    from tensortap.monitoring.integrations import lightning as home

    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "lightning.pytorch")
        assert home._base() is other.Callback
    spec = importlib.util.spec_from_file_location(f"{home.__package__}.again", home.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    callback = again.TapCallback(tmp_path / "run", every=1)
    assert isinstance(callback, pl.Callback) and isinstance(callback, other.Callback)

    class Other(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return sum(block(batch).sum() for block in self.blocks)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = other.Trainer(
            accelerator="cpu",
            logger=False,
            max_epochs=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[callback],
        )
        run.fit(Other(), DataLoader(torch.ones(4, 4)))
    found = records(tap.open(tmp_path / "run"), layer="blocks.0", port="output")
    assert [r.batch for r in found] == [0, 1, 2, 3]
    fit(trainer(again.TapCallback(tmp_path / "ours", every=1)), Module())
    assert tap.open(tmp_path / "ours").status == "complete"


# Document 004's monitor


def monitored(folder: Path, model: nn.Module, epochs: list[int]) -> tap.Monitor:
    layers = {
        "net.blocks.0": {"alias": "first", "record_type": "single"},
        "net.blocks.1": {"alias": "second", "record_type": "epoch_full"},
    }
    return tap.Monitor(model, layers, epochs, str(folder), batch_indices=[0, 3])


def test_a_monitor_goes_along(tmp_path) -> None:
    module = Module()
    before = hooks(module)
    monitor = monitored(tmp_path / "seen", module, [1])
    fit(trainer(TapCallback(monitor=monitor)), module, loader(), loader())
    assert hooks(module) == before and monitor.closed
    run = tap.open(tmp_path / "seen")
    assert run.status == "complete"
    # Micro-batches are batches of the loader; sanity check and validation are not heard.
    assert [(r.epoch, r.batch) for r in records(run, layer="net.blocks.0")] == [(1, 0), (1, 3)]
    full = records(run, layer="net.blocks.1")
    assert [(r.epoch, r.batch, r.call) for r in full] == [(1, b, 0) for b in range(BATCHES)]
    assert {path.suffix for path in (tmp_path / "seen").rglob("*.pt")} == {".pt"}


def test_a_monitor_and_a_watch_beside_each_other(tmp_path) -> None:
    module = Module(fail_at=5)
    before = hooks(module)
    monitor = monitored(tmp_path / "seen", module, [0])
    callback = TapCallback(tmp_path / "run", monitor=monitor, every=1)
    with pytest.raises(RuntimeError, match="cursed"):
        fit(trainer(callback), module)
    assert hooks(module) == before and monitor.closed
    for folder in ("seen", "run"):
        run = tap.open(tmp_path / folder)
        assert run.status == "failed" and "cursed" in run.manifest.failure
    assert len(records(tap.open(tmp_path / "seen"), layer="net.blocks.1")) == 5
    assert list((tmp_path / "seen").rglob("*.pt"))  # what was recorded is on disk


def test_options_of_a_watch_need_its_path(tmp_path) -> None:
    monitor = monitored(tmp_path / "seen", Module(), [0])
    with pytest.raises(OptionError, match="path of the watch"):
        TapCallback(monitor=monitor, every=2)
    monitor.close()
