"""An epoch larger than memory goes through the disk, and its statistics are exact all the same."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest
import torch
from monitor_models import Returns, batches, files, small
from test_monitor_saving import script
from torch import nn

import tensortap as tap
from forked_commands import Commands

FULL = {"record_type": "epoch_full"}


def load(path):
    return torch.load(path, weights_only=True)


def hold(tmp_path, limit, dtype=torch.float32, count=5):
    model = Returns(lambda x: (x.to(dtype), (x[:, :2] * 1e6 + 1e3)))
    layers = {"part": {**FULL, "alias": "p"}, "": {"leaf": 0}}
    monitor = tap.Monitor(
        model, layers, [1], tmp_path / str(limit), [0, 1], memory_limit=limit, overwrite=True
    )
    monitor.set_epoch(1)
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(count):
            monitor.set_batch_idx(index)
            x = torch.randn(3 + index % 2, 7, generator=generator)
            if index == 2:
                x[0, 0], x[0, 1], x[1, 2] = float("nan"), float("inf"), 0.0
            model(x)
    return monitor, [str(w.message) for w in caught]


@pytest.mark.parametrize("limit", [0, 1, 100, 300, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_limit_changes_where_things_lie_and_nothing_else(tmp_path, limit, dtype) -> None:
    plain, quiet = hold(tmp_path, 1 << 30, dtype)
    tight, said = hold(tmp_path, limit, dtype)
    assert not quiet and len(said) == (limit < 1 << 20)
    for get in ("get_single_data", "get_epoch_data"):
        one, two = getattr(plain, get)(), getattr(tight, get)()
        assert str(one) == str(two) and one
    assert str(plain.get_epoch_buffers()) == str(tight.get_epoch_buffers())
    for monitor in (plain, tight):
        monitor.save_epoch_outputs()
        monitor.remove_hooks()
    folders = tmp_path / str(1 << 30), tmp_path / str(limit)
    assert files(folders[0]) == files(folders[1])
    for name in files(folders[0]):
        assert str(load(folders[0] / name)) == str(load(folders[1] / name))
    assert sorted(p.name for p in folders[1].iterdir() if p.name.startswith(".")) == []


def test_statistics_are_exact_against_float64(tmp_path) -> None:
    monitor, _ = hold(tmp_path, 0)
    parts = [output[1] for output in monitor.get_epoch_buffers()["p"]]
    (path,) = monitor.save_epoch_outputs()
    found = load(path)["statistics"][1]
    whole = torch.cat(parts).double()
    finite = whole[whole.isfinite()]
    assert found["count"] == whole.numel() and found["nan"] == 1 and found["posinf"] == 1
    assert found["zeros"] == (whole == 0).sum() and found["neginf"] == 0
    assert found["mean"] == pytest.approx(finite.mean().item(), rel=1e-12)
    assert found["std"] == pytest.approx(finite.std(correction=0).item(), rel=1e-12)
    assert found["rms"] == pytest.approx(finite.square().mean().sqrt().item(), rel=1e-12)
    assert found["l2"] == pytest.approx(finite.norm().item(), rel=1e-12)
    assert (found["min"], found["max"]) == (finite.min().item(), finite.max().item())
    assert found["absmax"] == finite.abs().max().item()
    monitor.remove_hooks()


def test_what_comes_from_disk_is_the_users_own(tmp_path) -> None:
    monitor, _ = hold(tmp_path, 0)
    data = monitor.get_epoch_data()["p"]["data"]
    before = str(data)
    for output in data.values():
        output[0].fill_(9)
    assert str(monitor.get_epoch_data()["p"]["data"]) == before
    kept = monitor.get_epoch_data()["p"]["data"]
    monitor.clear_current_epoch_data()
    monitor.remove_hooks()
    del monitor
    gc.collect()
    assert str(kept) == before, "also when what it was read from is gone"


def test_the_warning_says_how_much_of_what_and_what_to_do(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(8, 4000), nn.Linear(4000, 2))
    layers = {"0": {**FULL, "alias": "wide"}, "1": {**FULL}}
    monitor = tap.Monitor(model, layers, [1, 2], tmp_path, memory_limit=100_000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in (1, 2):
            monitor.set_epoch(epoch)
            for index in range(4):
                monitor.set_batch_idx(index)
                model(torch.randn(4, 8))
    (warning,) = caught
    text = str(warning.message)
    assert "holds 125.0 KiB, more than its memory_limit of 97.7 KiB" in text
    assert "'wide' (125.0 KiB)" in text
    assert "sample_every" in text and "memory_limit" in text
    monitor.remove_hooks()


def test_memory_is_given_back_when_an_epoch_is_cleared(tmp_path) -> None:
    model = small()
    monitor = tap.Monitor(model, {"head": {**FULL}}, [1, 2], tmp_path, memory_limit=400)
    for epoch in (1, 2):
        monitor.set_epoch(epoch)
        monitor.set_batch_idx(0)
        model(batches()[0])
        assert monitor._held.bytes == 160, "one batch fits"
        monitor.set_batch_idx(0)
        model(batches()[0])
        assert monitor._held.bytes == 160, "the same batch again takes the place of the first"
    monitor.clear_current_epoch_data()
    assert monitor._held.bytes == 0
    monitor.remove_hooks()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_layers_and_batches_take_few_file_descriptors(tmp_path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(80)))
    monitor = tap.Monitor(model, {"*": {**FULL}}, [1], tmp_path, memory_limit=0, keep="summary")
    monitor.set_epoch(1)
    before = descriptors()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(30):
            monitor.set_batch_idx(index)
            model(torch.full((2, 4), float(index)))
    data = monitor.get_epoch_data()
    assert descriptors() - before < 150, "80 layers, 2400 outputs"
    expected = {name: list(info["data"].values()) for name, info in data.items()}
    monitor.save_epoch_outputs()
    monitor.remove_hooks()
    for name, outputs in expected.items():
        item = load(tmp_path / f"epoch_{name}_epoch1.pt")
        assert torch.equal(item["output"], torch.cat(outputs))
    del data, expected, outputs
    monitor.clear_current_epoch_data()
    gc.collect()
    assert descriptors() <= before + 1


LARGE = """
import resource, sys, warnings
import torch, tensortap as tap
from monitor_models import Returns
torch.set_num_threads(1)

def anonymous(kind="RssAnon"):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(kind)) << 10

class Big(torch.nn.Module):
    def forward(self, x):
        return x.expand(256, 32768) * torch.arange(32768.0)

model = Big()
monitor = tap.Monitor(
    torch.nn.Sequential(model), {"0": {"record_type": "epoch_full", "alias": "big"}}, [1],
    sys.argv[1], memory_limit=32 << 20, keep="summary", save_format=sys.argv[2],
)
monitor.set_epoch(1)
warnings.simplefilter("ignore")
with torch.no_grad():
    monitor.set_batch_idx(99)
    monitor.model(torch.zeros(1, 1))  # warm
    monitor.clear_current_epoch_data()
    start, peak = anonymous(), 0
    # The operating system refuses more than this; what is to be held is 320 MiB.
    limit = anonymous("VmData") + (170 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    for index in range(10):
        monitor.set_batch_idx(index)
        monitor.model(torch.full((1, 1), float(index)))
        peak = max(peak, anonymous())
    (path,) = monitor.save_epoch_outputs()
    peak = max(peak, anonymous())
monitor.remove_hooks()
# Copies on write count as memory that might be needed, although none is.
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
data = monitor.get_epoch_data()["big"]["data"]
total = sum(output[0, 1].item() for output in data.values())
peak = max(peak, anonymous())
print(path, len(data), total, (peak - start) >> 20)
"""


@pytest.mark.parametrize("fmt", ["pt", "npy"])
def test_an_epoch_larger_than_memory(tmp_path, fmt, forked: Commands) -> None:
    """320 MiB, of which the process may hold 32; it is not allowed the memory to cheat."""
    done = script(forked, LARGE, tmp_path / "out", fmt)
    assert done.code == 0, done.stderr[-2000:]
    path, count, total, grown = done.stdout.split()
    assert (count, total) == ("10", "45.0")
    assert int(grown) < 160, "MiB"
    if fmt == "pt":
        item = torch.load(path, weights_only=True, mmap=True)
        assert item["output"].shape == (2560, 32768)
        assert torch.equal(item["output"][2559], 9 * torch.arange(32768.0))
        statistics = item["statistics"]
        n = 32767
        assert statistics["count"] == 2560 * 32768
        assert statistics["mean"] == pytest.approx(4.5 * n / 2, rel=1e-12)
        square = 28.5 * (n * (2 * n + 1) / 6)
        assert statistics["std"] == pytest.approx((square - (2.25 * n) ** 2) ** 0.5, rel=1e-12)
        assert (statistics["min"], statistics["max"]) == (0, 9 * n)


def test_the_test_above_can_fail(tmp_path, forked: Commands) -> None:
    """Without a limit the operating system refuses the memory: training runs on, batches lack."""
    done = script(forked, LARGE.replace("32 << 20", "1 << 40"), tmp_path / "out", "pt")
    assert done.code != 0 or done.stdout.split()[1] != "10", done.stdout
