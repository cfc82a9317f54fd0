"""A small GPT in plain torch, for loops whose saves are measured. Imports nothing of ours, so others may run it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HEAD = 32


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.qkv(self.norm(x)).unflatten(-1, (3, -1, HEAD)).unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.other(x))))


class GPT(nn.Module):
    """Tokens in, and the loss of guessing each one's successor among the tokens of the batch.

    Args:
        vocabulary: number of tokens. width: of the embedding, a multiple of `HEAD`. layers: number of blocks.
        sparse: gradients of the embedding have the rows of the batch only, so that a step touches no others.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, sparse=sparse)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        guesses, right = self.norm(self.blocks(x))[:, :-1].flatten(0, 1), x[:, 1:].flatten(0, 1)
        return F.cross_entropy(guesses @ right.T, torch.arange(len(right), device=tokens.device))
