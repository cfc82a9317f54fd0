"""Whether tensors are what they were but for their content: thousands of them, in a millisecond or two.

Owns the use of the guards that torch compares the arguments of compiled functions with, which do that in C++, and what
is done where torch has none that answer as they should.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter, eq
from typing import Any

import torch

Guard = Callable[[Sequence[torch.Tensor]], bool]

_ATTRIBUTES = tuple(map(attrgetter, ("shape", "dtype", "layout", "device", "requires_grad")))
_ASPECTS: tuple[Callable[[torch.Tensor], Any], ...] = (*_ATTRIBUTES, torch.Tensor.stride, torch.Tensor.is_neg)


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """What tells whether as many tensors have the types, shapes, strides, dtypes, layouts and devices of these, in this
    order, and whether they want gradients. It may say no where they have, never yes where they have not.

    Args:
        tensors: distinct plain strided ones. They are not kept.
    """
    return _compiled(tensors) if _answers_rightly() else _compared(tensors)


def _compiled(tensors: Sequence[torch.Tensor]) -> Guard:
    from torch._C._dynamo.guards import TensorGuards  # not in all releases

    known: Any = {
        "dynamic_dims_sizes": [list(tensor.shape) for tensor in tensors],
        "dynamic_dims_strides": [list(tensor.stride()) for tensor in tensors],
    }
    guards: Any = TensorGuards(*tensors, **known)
    count = len(tensors)
    return lambda others: len(others) == count and guards.check(*others) is True


def _compared(tensors: Sequence[torch.Tensor]) -> Guard:
    kinds = list(map(type, tensors))
    known = [(aspect, list(map(aspect, tensors))) for aspect in _ASPECTS]
    lazy = any(map(torch.is_complex, tensors))  # views of such may have bits that these aspects do not tell of

    def check(others: Sequence[torch.Tensor]) -> bool:
        if lazy or list(map(type, others)) != kinds:
            return False
        return all(all(map(eq, map(aspect, others), values)) for aspect, values in known)

    return check


@functools.cache
def _answers_rightly() -> bool:
    """Whether torch's guards are there, and notice all that counts."""
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
    try:
        one, other = zeros(2, 3), torch.nn.Parameter(zeros(3, dtype=torch.complex64))
        check = _compiled([one, other])
        alike = [zeros(2, 3).fill_(1), torch.nn.Parameter(zeros(3, dtype=torch.complex64).fill_(1))]
        if not check([one, other]) or not check(alike):
            return False
        frozen = torch.nn.Parameter(other.detach(), requires_grad=False)
        lazy = torch.nn.Parameter(other.detach().conj())
        others = [
            [zeros(3, 2), other],
            [zeros(2, 3).double(), other],
            [zeros(3, 2).t(), other],
            [zeros(2, 3).to_sparse(), other],
            [zeros(2, 3, device="meta"), other],
            [torch.nn.Parameter(one, requires_grad=False), other],
            [one, frozen],
            [one, lazy],
            [one],
            [one, other, other],
            [1, other],
        ]
        return not any(check(each) for each in others)  # type: ignore[arg-type]
    except Exception:  # of whatever kind another release raises
        return False
