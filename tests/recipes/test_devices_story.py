"""recipes/devices, the tool that measures it, and docs/devices.md."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tensortap as tap
from forked_commands import Commands, Ran
from tensortap.errors import OptionError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "devices.md"
CUDA = torch.cuda.is_available()


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "devices"))
    import llama

    return llama


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    import devices

    return devices


def test_every_mode_starts_from_the_same_bits(llama: ModuleType) -> None:
    state = torch.get_rng_state()
    plain, other = (llama.build(mode, tiny=True) for mode in ("cpu-fp32", "cpu-order"))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [target.model.state_dict() for target in (plain, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    wide = llama.build("cpu-fp64", tiny=True).model.state_dict()
    assert all(torch.equal(weights[0][name], wide[name].float()) for name in wide)


def test_the_order_of_sums_changes_bits_and_no_more(llama: ModuleType) -> None:
    plain, other = (llama.build(mode, tiny=True) for mode in ("cpu-fp32", "cpu-order"))
    with torch.no_grad():
        found = tap.difference(*(target(target.batches[0]) for target in (plain, other)))
    assert 0 < found.error < 1e-6


@pytest.mark.parametrize("fault", ["epsilon", "bias", "transposed", "tf32"])
def test_a_fault_changes_the_layer_that_it_names_and_none_before(
    llama: ModuleType, fault: str
) -> None:
    heard: list[dict[str, torch.Tensor]] = []
    for planted in ("", fault):
        target = llama.build(fault=planted, tiny=True)
        outputs: dict[str, torch.Tensor] = {}
        for name, part in target.model.named_modules():
            part.register_forward_hook(lambda m, a, out, n=name, o=outputs: o.update({n: out}))
        with torch.no_grad():
            target(target.batches[0])
        heard.append(outputs)
    changed = [name for name in heard[0] if not torch.equal(heard[0][name], heard[1][name])]
    assert changed[0] == llama.FAULTS[fault](llama.Model(llama.TINY))
    assert set(llama.FAULTS) == {"epsilon", "bias", "transposed", "tf32"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "tpu"}, "There is no mode 'tpu'. The modes are cpu-fp32,"),
        ({"fault": "gremlin"}, "There is no fault 'gremlin'. The faults are epsilon,"),
        ({"seq_len": 25}, "seq_len is 25, expected a whole number from 1 to 24."),
    ],
)
def test_what_there_is_not_is_a_sentence(llama: ModuleType, options: dict, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        llama.build(**options, tiny=True)


@pytest.mark.skipif(CUDA, reason="says what is missing without a CUDA device")
def test_the_gpus_modes_are_missing_in_a_sentence(forked: Commands, tmp_path: Path) -> None:
    ran = typed(forked, tmp_path, "tensortap record llama.py:build --mode gpu-tf32 -o runs")
    assert ran.code == 2
    assert "The mode 'gpu-tf32' needs a CUDA device, and torch" in ran.stderr
    assert "Without one there are cpu-fp32, cpu-fp64," in ran.stderr


def test_the_tool_measures_what_there_is(
    devices: ModuleType,
    llama: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(llama, "FAULTS", {"epsilon": llama.FAULTS["epsilon"]})
    *_, found = devices.measure(tmp_path, tiny=True, jobs=1)
    json.dumps(found)
    if not CUDA:
        assert "sees no CUDA device: gpu-fp32, gpu-repeat," in capsys.readouterr().err
        assert set(found["modes"]) == set(llama.MODE_GROUPS["cpu"])
    told = {item["name"]: item for item in found["comparisons"]}
    assert told["order"]["same"] and told["order"]["counts"]["within"] > 40
    assert told["cpu-bf16"]["first"] == "blocks.0.attention.q"  # over a float32 floor
    plain = [f for f in found["faults"] if f["mode"].endswith("fp32")]
    assert len(plain) == 2 * len(llama.FAULTS)
    assert all(f["first"] == f["layer"] and f["origin"] == "made here" for f in plain)


def test_the_page_and_its_pictures_are_made_from_the_data(
    devices: ModuleType, tmp_path: Path
) -> None:
    import devices_page

    data = json.loads(devices.DATA.read_text())
    shutil.copy(PAGE, tmp_path)
    devices_page.write(data, tmp_path)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text(), "run tools/devices.py"
    drawn = set(re.findall(r"\((devices-\w+\.png)\)", PAGE.read_text()))
    assert drawn == {path.name for path in tmp_path.glob("*.png")}


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("tensortap ")]


def test_the_commands_of_the_page_run(forked: Commands, tmp_path: Path) -> None:
    """Those that need a GPU say so, and run where there is one."""
    shown = [line for line in commands() if CUDA or "needs a GPU" not in line]
    assert len(shown) >= 5
    for line in shown:
        ran = typed(forked, tmp_path, line)
        code = re.search(r"exit (\d)", line)
        assert ran.code == int(code[1] if code else 0), f"{line}\n{ran.stdout}{ran.stderr}"
        assert ran.stdout.strip()


_TYPED = """
import os, sys
os.environ["TENSORTAP_TINY"] = "1"
os.chdir(sys.argv[1])
sys.argv = sys.argv[2:]
from tensortap.cli.main import main
main()
"""


def typed(forked: Commands, folder: Path, line: str) -> Ran:
    """A command of ours as somebody types it in a copy of recipes/devices, on the tiny model."""
    shutil.copy(ROOT / "recipes" / "devices" / "llama.py", folder)
    return forked.python(_TYPED, folder, *shlex.split(line, comments=True))
