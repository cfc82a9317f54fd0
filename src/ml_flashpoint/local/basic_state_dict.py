"""`TensorAwareStateDict`: the interface of states whose tensors can be told from their structure.
`BasicTensorAwareStateDict`: any nesting of containers with tensors in it, as such a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy.cpu import cpu_clone
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local.errors import CallOrderError
from ml_flashpoint.state.archive import PLAIN_BASES, attributes_of, is_plain, new_instance
from ml_flashpoint.state.private import tree_map


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


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """A state of dicts, lists, tuples, namedtuples and dataclasses in any nesting, with tensors anywhere in it.

    Tensors may be on any device; parameters and DTensors stay what they are. Of a DTensor, ``tensors`` and the
    methods about them mean its local shard. The containers of ``state_dict`` are copied here, so what is done to
    this object does not show in them; the tensors are shared until `copy_tensors_to_cpu`.

    All methods about tensors raise a `CallOrderError` while the state is hollow; those that put tensors in, while it
    is not.

    Args:
        state_dict: what to hold.

    Raises:
        InvalidArgumentError: it is a `TensorAwareStateDict` already, or contains itself.
    """

    def __init__(self, state_dict: Any) -> None:
        if isinstance(state_dict, TensorAwareStateDict):
            raise InvalidArgumentError(
                "is tensor-aware already: save it as it is", argument="state_dict", value=type(state_dict)
            )
        try:
            self._nest = _map_tensors(lambda tensor: tensor, state_dict)
        except RecursionError:
            raise InvalidArgumentError(
                "is nested too deeply, or contains itself", argument="state_dict", value=type(state_dict)
            ) from None
        self._is_hollow = False
        # Of each tensor, in order, the device that it is away from; empty if none is.
        self._origins: list[torch.device] = []

    @property
    def state_dict(self) -> Any:
        """State; while it is hollow, with tensors on the meta device, which have no memory."""
        return self._nest

    @property
    def is_hollow(self) -> bool:
        """True if the tensors were taken out and not put back."""
        return self._is_hollow

    @property
    def is_away(self) -> bool:
        """True if the tensors are not on their devices, to which `restore_tensor_device` would move them."""
        return bool(self._origins)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensors, in the order of the nesting."""
        self._check_hollow(False, "tensors")
        return iter(self._locals())

    def values(self) -> ValuesView[Any]:
        """Return the values of the state, if it is a mapping."""
        return self._nest.values() if isinstance(self._nest, Mapping) else super().values()

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out, and return them."""
        self._check_hollow(False, "pop_tensors")
        popped = self._locals()
        self._origins = self._origins or [tensor.device for tensor in popped]
        self._replace([torch.empty_like(tensor, device="meta") for tensor in popped])
        self._is_hollow = True
        return popped

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places of those popped, in their order.

        Raises:
            InvalidArgumentError: they are too many or too few, or one has another dtype or shape. The state stays as
                it was.
        """
        self._check_hollow(True, "insert_tensors")
        given = list(tensor_data)
        forms = [(tensor.dtype, tuple(tensor.shape)) for tensor in given]
        expected = [(place.dtype, tuple(place.shape)) for place in self._locals()]
        if forms != expected:
            raise InvalidArgumentError(f"must be tensors of {expected}", argument="tensor_data", value=forms)
        self._replace(given)
        self._is_hollow = False
        if [tensor.device.type for tensor in given] == [origin.type for origin in self._origins]:
            self._origins = []

    def init_tensors(self) -> None:
        """Put new, uninitialized tensors in the places of those popped, on the devices that these were on."""
        self._check_hollow(True, "init_tensors")
        places = zip(self._locals(), self._origins, strict=True)
        self.insert_tensors([torch.empty_like(place, device=device) for place, device in places])

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU; those there already are copied as well, once."""
        self._check_hollow(False, "copy_tensors_to_cpu")
        if not self._origins:
            tensors = self._locals()
            self._origins = [tensor.device for tensor in tensors]
            self._replace(
                cpu_clone(tensor) if tensor.is_cpu else tensor.to("cpu", non_blocking=non_blocking)
                for tensor in tensors
            )

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to where `copy_tensors_to_cpu`, or `pop_tensors`, found them."""
        self._check_hollow(False, "restore_tensor_device")
        if self._origins:
            places = zip(self._locals(), self._origins, strict=True)
            self._replace([tensor.to(device, non_blocking=non_blocking) for tensor, device in places])
            self._origins = []

    def _locals(self) -> list[torch.Tensor]:
        """Return the tensors in order, of DTensors this rank's shards."""
        found: list[torch.Tensor] = []
        _map_tensors(found.append, self._nest)
        return [each.to_local().detach() if isinstance(each, DTensor) else each.detach() for each in found]

    def _replace(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places of those there, as parameters or DTensors where these are."""
        remaining = iter(tensors)
        self._nest = _map_tensors(lambda place: rewrap(next(remaining), flags_of(place), _layout_of(place)), self._nest)

    def _check_hollow(self, expected: bool, what: str) -> None:
        if self._is_hollow != expected:
            state = "hollow: its tensors were taken out" if self._is_hollow else "not hollow: its tensors are in it"
            raise CallOrderError(f"{what} cannot be used, the state is {state}")


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()


def flags_of(tensor: torch.Tensor) -> int:
    """Return a number for what `rewrap` restores: 1 for a tensor that wants a gradient, plus 2 for a parameter."""
    return int(tensor.requires_grad) + 2 * isinstance(tensor, torch.nn.Parameter)


def rewrap(plain: torch.Tensor, flags: int, layout: tuple[Any, ...] | None = None) -> torch.Tensor:
    """Return a tensor as a parameter or with a gradient, as `flags_of` says, or as the local shard of a DTensor.

    Args:
        layout: mesh, placements, shape and strides of the DTensor; None for none.
    """
    if layout is not None:
        mesh, placements, shape, stride = layout
        plain = DTensor.from_local(plain, mesh, placements, run_check=False, shape=shape, stride=tuple(stride))
    if flags & 2:
        return torch.nn.Parameter(plain, bool(flags & 1))
    return plain.detach().requires_grad_() if flags & 1 else plain


def _map_tensors(change: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """Return a copy of the containers of ``nest`` in which every tensor is ``change(tensor)``."""
    return tree_map(partial(_mapped, change), nest, is_leaf=lambda each: type(each) in (OrderedDict, torch.Size))


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is OrderedDict:
        made = OrderedDict((key, _map_tensors(change, each)) for key, each in value.items())
        made.__dict__.update(vars(value))  # `_metadata` of a module's state
        return made
    if is_plain(type(value)):
        changed = {name: _map_tensors(change, each) for name, each in attributes_of(value).items()}
        return new_instance(type(value), changed)
    return value
