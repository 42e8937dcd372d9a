"""Networks with memory: two LSTMs over words, and a GRU over a signal."""

from __future__ import annotations

import torch
from architecture import SAMPLES, VOCABULARY, Architecture, Inputs, padded
from torch import Tensor, nn

__all__ = ["MODELS"]


class Words(nn.Module):
    """Words to a class: embedding, two LSTMs, the mean over the words that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.lstm1 = nn.LSTM(32, 48, batch_first=True)
        self.norm = nn.LayerNorm(48)
        self.lstm2 = nn.LSTM(48, 24, batch_first=True, bidirectional=True)
        self.mid, self.head = nn.Linear(48, 48), nn.Linear(48, 7)
        self.pooling, self.masked, self.buckets = "mean", True, VOCABULARY

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, _ = self.lstm1(self.embedding(input_ids % self.buckets))
        x, _ = self.lstm2(self.norm(x))
        there = attention_mask if self.masked else torch.ones_like(attention_mask)
        there = there[..., None].to(x.dtype)
        if self.pooling == "mean":
            pooled = (x * there).sum(1) / there.sum(1)
        elif self.pooling == "max":
            pooled = x.masked_fill(there == 0, -torch.inf).amax(1)
        else:
            pooled = x[:, -1]
        return self.head(torch.tanh(self.mid(pooled)))


class Signal(nn.Module):
    """A signal in pieces, each of which starts from the state that the one before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 32, 5, 2, 2)
        self.bn = nn.BatchNorm1d(32)
        self.gru = nn.GRU(32, 40, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(40), nn.Linear(40, 6)
        self.carried, self.pieces = True, 3

    def forward(self, signal: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(signal))).transpose(1, 2)
        state, made = None, []
        for piece in x.chunk(self.pieces, 1):
            y, state = self.gru(piece, state if self.carried else None)
            made.append(y)
        return self.head(self.norm(torch.cat(made, 1)))


class Cells(nn.Module):
    """Cells that are called once for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 32)
        self.lstm, self.gru = nn.LSTMCell(32, 32), nn.GRUCell(32, 32)
        self.head = nn.Linear(32, 8)
        self.forget = False

    def forward(self, signal: Tensor) -> Tensor:
        x = torch.tanh(self.into(signal.transpose(1, 2)[:, :16]))
        h = c = g = x.new_zeros(len(x), 32)
        made = []
        for step in range(x.shape[1]):
            if self.forget and step == 6:
                c = torch.zeros_like(c)
            h, c = self.lstm(x[:, step], (h, c))
            g = self.gru(h, g)
            made.append(self.head(g))
        return torch.stack(made, 1)


def _signal(generator: torch.Generator) -> Inputs:
    return {"signal": torch.randn(SAMPLES, 4, 48, generator=generator)}


MODELS = (
    Architecture(
        "lstm",
        Words,
        "",
        {},
        {
            "embedding": "embedding",
            "norm": "norm",
            "lstm": "lstm1",
            "down": "mid",
            "head": "head",
        },
        padded,
        "recurrent",
    ),
    Architecture(
        "gru",
        Signal,
        "",
        {},
        {"norm": "norm", "conv": "conv", "batch_norm": "bn", "down": "head", "head": "head"},
        _signal,
        "recurrent",
    ),
    Architecture("cells", Cells, "", {}, {"up": "into", "down": "head"}, _signal, "recurrent"),
)
