"""`TensorAwareStateDict`: the interface of states whose tensors can be told from their structure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, ValuesView
from typing import Any

import torch

from ml_flashpoint.state.archive import PLAIN_BASES


class TensorAwareStateDict(ABC):
    """A state to checkpoint, as `LocalCheckpointManager.save` takes it and `load` returns it.

    A *hollow* state has had its tensors taken out and not put back yet. A subclass must be able to move its tensors
    to the CPU and back; taking them out is optional (`NotImplementedError`). Subclasses are stored by their attributes,
    which may nest in any way that `BasicTensorAwareStateDict` describes, and are made again without their constructor.
    """

    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out, and return them. The state is hollow afterwards."""
        raise self._cannot("pop_tensors")

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """Tensors, in the order in which `pop_tensors` returns them."""
        raise self._cannot("tensors")

    @property
    def is_hollow(self) -> bool:
        """True if the tensors were taken out and not put back."""
        raise self._cannot("is_hollow")

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in, as many and in the same order as they were taken out. Undoes `pop_tensors`."""
        raise self._cannot("insert_tensors")

    def init_tensors(self) -> None:
        """Put new tensors in, of the shapes, dtypes and devices of those taken out, with undefined content."""
        raise self._cannot("init_tensors")

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU, and remember where they were. With ``non_blocking``, copies from a
        device may still be under way on return."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to where `copy_tensors_to_cpu` found them."""

    def values(self) -> ValuesView[Any]:
        """Return the values of the attributes."""
        return vars(self).values()

    def _cannot(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {what}: it is stored whole")


PLAIN_BASES.append(TensorAwareStateDict)
