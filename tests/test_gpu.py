"""On a CUDA device; skipped without one."""

from __future__ import annotations

import pytest
import torch

import tensortap as tap
from support import Net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_on_a_gpu_are_recorded_as_plain_hooks_see_them(recorded, dtype) -> None:
    torch.manual_seed(0)
    net = Net(width=64).eval().cuda().to(dtype)
    ids = torch.arange(12, device="cuda").view(2, 6)
    kept: dict[str, torch.Tensor] = {}
    for name, module in net.named_modules():
        module.register_forward_hook(lambda m, a, out, n=name: kept.__setitem__(n, out.clone()))
    with torch.no_grad():
        plain = net(ids)
        run = recorded(net, ids, inputs=True)
    for name in run.layers:
        assert torch.equal(run[name].output, kept[name].cpu()), name
    assert torch.equal(run[""].output, plain.cpu())
    assert run["head"].records[0].device == "cuda:0"
    assert run.manifest.device == "cuda:0"


def test_training_on_a_gpu_is_bit_identical(tmp_path) -> None:
    torch.manual_seed(0)
    net = Net(width=64).train().cuda()
    ids = torch.arange(12, device="cuda").view(2, 6)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        out = net(ids)
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in net.parameters())]

    plain = step()
    with tap.record(net, tmp_path / "r", layers="all", inputs=True, grads=True) as rec:
        during = step()
    assert rec.failure is None
    assert all(torch.equal(a, b) for a, b in zip(plain, during, strict=True))
    assert len(tap.open(tmp_path / "r")["head"].port("grad_output")) == 1


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8],
)
def test_summaries_of_device_tensors_agree_with_the_cpu(dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(1000, 33) * 20).to(dtype)
    here, there = tap.summarize(x), tap.summarize(x.cuda())
    assert (there.count, there.nan, there.zeros) == (here.count, here.nan, here.zeros)
    for name in ("mean", "std", "min", "max", "absmax", "l2"):
        assert getattr(there, name) == pytest.approx(getattr(here, name), rel=1e-6), name


def test_summaries_alone_keep_nothing_on_the_device(tmp_path) -> None:
    net = Net(width=256, blocks=4).eval().cuda()
    ids = torch.randint(0, 16, (8, 512), device="cuda")
    with torch.no_grad(), tap.record(net, tmp_path / "r", layers="all", keep="summary") as rec:
        net(ids)
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            rec.step()
            net(ids)
        assert torch.cuda.memory_allocated() - before < 1 << 20  # the inputs, and nothing of layers


def test_a_device_tensor_beyond_the_budget_is_brought_over_in_pieces(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Identity())
    x = torch.randn(64, 1 << 18, device="cuda")
    with tap.record(model, tmp_path / "r", layers="leaves", budget=16 << 20) as rec:
        rec.run(x)
    assert rec.failure is None
    assert torch.equal(tap.open(tmp_path / "r")["0"].output, x.cpu())


def test_compiled_on_a_gpu(recorded) -> None:
    torch.manual_seed(0)
    net = Net(width=64).eval().cuda()
    ids = torch.arange(12, device="cuda").view(2, 6)
    with torch.no_grad():
        expected = recorded(net, ids)
        run = recorded(torch.compile(net, fullgraph=True), ids)
    assert run.layers == expected.layers
    for name in run.layers:
        torch.testing.assert_close(run[name].output, expected[name].output)
