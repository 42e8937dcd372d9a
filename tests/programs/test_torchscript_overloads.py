"""TorchScript: modules whose forward is overloaded have one compiled method for each overload."""

from typing import Any, List  # noqa: UP035

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import tensortap as tap
from programs.test_torchscript import assert_exact, reloaded
from tensortap.taps.programs.torchscript.ops import ops_program
from tensortap.taps.programs.torchscript.program import ScriptProgram

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Tagger(nn.Module):
    """A recurrent layer called twice, the second time with the state of the first."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.rnn = recurrent
        self.head = nn.Linear(recurrent.hidden_size * (1 + recurrent.bidirectional), 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        first, state = self.rnn(hidden)
        second, _ = self.rnn(hidden, state)
        return self.head(first + second)


class Packed(nn.Module):
    """A recurrent layer that is given a packed sequence, which is another overload."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        made, _ = self.rnn(packed)
        return self.head(pad_packed_sequence(made, batch_first=True)[0])


class DenseLayer(nn.Module):
    """As a layer of DenseNet, which takes one tensor or the list of all before it."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(wide)
        self.linear = nn.Linear(wide, 4)

    @torch.jit._overload_method
    def forward(self, x: List[Tensor]) -> Tensor:  # noqa: UP006
        pass

    @torch.jit._overload_method
    def forward(self, x: Tensor) -> Tensor:  # noqa: F811
        pass

    def forward(self, x):  # noqa: F811
        before = [x] if isinstance(x, Tensor) else x
        return self.linear(torch.relu(self.norm(torch.cat(before, 1))))


class Last(nn.Linear):
    """Overloads, and weights of its own."""

    @torch.jit._overload_method
    def forward(self, x: List[Tensor]) -> Tensor:  # noqa: UP006
        pass

    @torch.jit._overload_method
    def forward(self, x: Tensor) -> Tensor:  # noqa: F811
        pass

    def forward(self, x):  # noqa: F811
        before = [x] if isinstance(x, Tensor) else x
        return nn.functional.linear(torch.cat(before, 1), self.weight, self.bias)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = Last(16, 3)
        self.first = DenseLayer(4)
        self.layers = nn.ModuleDict({f"denselayer{i}": DenseLayer(4 * (i + 1)) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for layer in self.layers.values():
            found.append(layer(found))
        return self.last(found)


IDS = torch.arange(10).view(2, 5)
MODELS = {
    "lstm": (lambda: Tagger(nn.LSTM(8, 6, batch_first=True)), (IDS,)),
    "lstm_deep": (lambda: Tagger(nn.LSTM(8, 6, num_layers=2, bidirectional=True)), (IDS,)),
    "lstm_without_bias": (lambda: Tagger(nn.LSTM(8, 5, bias=False)), (IDS,)),
    "gru": (lambda: Tagger(nn.GRU(8, 6, batch_first=True)), (IDS,)),
    "rnn": (lambda: Tagger(nn.RNN(8, 6, nonlinearity="relu")), (IDS,)),
    "packed": (Packed, (torch.randn(2, 5, 8), torch.tensor([5, 3]))),
    "dense": (DenseNet, (torch.randn(3, 4),)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("saved", [False, True])
def test_every_overload_of_forward_is_a_call_of_its_layer(name: str, saved: bool) -> None:
    make, args = MODELS[name]
    model = make().eval()
    script = torch.jit.script(model)
    assert_exact(model, ScriptProgram(reloaded(script) if saved else script), args)


def test_a_recording_of_a_file_is_that_of_the_model(tmp_path: Any) -> None:
    model = Tagger(nn.LSTM(8, 6, batch_first=True)).eval()
    torch.jit.save(torch.jit.script(model), tmp_path / "m.pt")
    for path, target in (("eager", model), ("script", tmp_path / "m.pt")):
        with tap.record(target, tmp_path / path, layers="all", inputs=True) as rec:
            rec.run(IDS)
    result = tap.compare(tmp_path / "eager", tmp_path / "script")
    assert {row.layer: row.verdict for row in result.layers} == dict.fromkeys(
        ["embed", "rnn", "head", ""], "identical"
    )
    assert not tap.open(tmp_path / "script").notes


def test_torchs_quantised_lstm_names_its_overloads_itself(tmp_path: Any) -> None:
    model = torch.ao.quantization.quantize_dynamic(
        Tagger(nn.LSTM(8, 6, batch_first=True)).eval(), {nn.LSTM}
    )
    program = ScriptProgram(reloaded(torch.jit.script(model)))
    assert {p.name: p.gone for p in program.places if p.name == "rnn"} == {"rnn": None}
    assert_exact(model, program, (IDS,))


def test_op_by_op_layers_with_overloads_keep_their_names() -> None:
    program = ops_program(torch.jit.script(DenseNet().eval()), None)
    named = {place.name for place in program.places if place.provenance == "weight"}
    assert {"first.linear", "layers.denselayer2.linear", "last"} <= named
