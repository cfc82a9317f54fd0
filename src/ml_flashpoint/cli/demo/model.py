"""A small GPT over bytes. Owns the model only: no data, no parallelism, no checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256
CONTEXT = 64
"""Bytes that the model looks back on."""

_WIDTH = 96
_HEADS = 4
_BLOCKS = 3
# Not for the model's sake: with dropout, training only goes on bit for bit if random numbers do.
_DROPOUT = 0.1


class Block(nn.Module):
    """Causal self-attention and an MLP, each on a residual branch; maps [batch, time, width] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.norm_2 = nn.LayerNorm(_WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, _HEADS, width // _HEADS).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, time, width)))
        x = x + self.dropout(self.mlp(self.norm_2(x)))
        return x


class GPT(nn.Module):
    """Maps bytes [batch, time] to the logits of each next byte [batch, time, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, _WIDTH)
        self.places = nn.Embedding(CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
