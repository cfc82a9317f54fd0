"""torch as a new process has it, for calls of torch's own checkpoint functions and optimizers on behalf of a program.

Those make tensors that name neither device nor dtype. The tensors that this package makes name both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Have new tensors on the CPU, and tracked by autograd, whatever the program has set. Not for calls of its code."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            # Nothing else lets tensors that are made now be changed in place later.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
