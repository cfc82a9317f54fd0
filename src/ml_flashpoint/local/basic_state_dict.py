"""`BasicTensorAwareStateDict`: any nesting of containers with tensors in it, as a `TensorAwareStateDict`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy.cpu import cpu_clone
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.errors import CallOrderError
from ml_flashpoint.state.archive import attributes_of, is_plain, new_instance
from ml_flashpoint.state.private import tree_map

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlaceholder:
    """A stand-in for a tensor in a hollow state.

    Attributes:
        like: a tensor without memory of the same dtype and shape; of a DTensor, of its local shard.
        device: where the tensor was.
        wrap: makes of a tensor what was there: a parameter or a DTensor, if it was one.
    """

    like: torch.Tensor
    device: torch.device
    wrap: Any


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """A state of dicts, lists, tuples, namedtuples and dataclasses in any nesting, with tensors anywhere in it.

    Tensors may be on any device; parameters and DTensors stay what they are. Of a DTensor, ``tensors`` and the
    methods about them mean its local shard. The containers of ``state_dict`` are copied here, so what is done to
    this object does not show in them; the tensors are shared until `copy_tensors_to_cpu`.

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
        """State, with placeholders for tensors while it is hollow."""
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
        """Tensors, in the order of the nesting.

        Raises:
            CallOrderError: the state is hollow.
        """
        self._check_hollow(False, "tensors")
        return iter([_local(tensor) for tensor in self._leaves(torch.Tensor)])

    def values(self) -> ValuesView[Any]:
        """Return the values of the state, if it is a mapping."""
        return self._nest.values() if isinstance(self._nest, Mapping) else super().values()

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out, leaving placeholders, and return them.

        Raises:
            CallOrderError: the state is hollow.
        """
        self._check_hollow(False, "pop_tensors")
        popped: list[torch.Tensor] = []
        origins = self._origins or [tensor.device for tensor in self._leaves(torch.Tensor)]

        def take(tensor: torch.Tensor) -> TensorPlaceholder:
            popped.append(_local(tensor))
            like = torch.empty_like(popped[-1], device="meta")
            return TensorPlaceholder(like, origins[len(popped) - 1], _wrapper_like(tensor))

        self._nest = _map_tensors(take, self._nest)
        self._origins = []
        self._is_hollow = True
        return popped

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places of those popped, in their order.

        Raises:
            CallOrderError: the state is not hollow.
            InvalidArgumentError: they are too many or too few, or one has another dtype or shape. The state stays as
                it was.
        """
        self._check_hollow(True, "insert_tensors")
        given = list(tensor_data)
        places = self._leaves(TensorPlaceholder)
        if len(given) != len(places):
            raise InvalidArgumentError(f"must be {len(places)} tensors", argument="tensor_data", value=len(given))
        for tensor, place in zip(given, places, strict=True):
            if tensor.dtype != place.like.dtype or tensor.shape != place.like.shape:
                raise InvalidArgumentError(
                    f"must be {place.like.dtype} of shape {tuple(place.like.shape)}",
                    argument="tensor_data",
                    value=(tensor.dtype, tuple(tensor.shape)),
                )
        remaining = iter(given)
        self._nest = _map_tensors(lambda place: place.wrap(next(remaining)), self._nest, TensorPlaceholder)
        self._is_hollow = False
        if any(tensor.device.type != place.device.type for tensor, place in zip(given, places, strict=True)):
            self._origins = [place.device for place in places]

    def init_tensors(self) -> None:
        """Put new, uninitialized tensors in the places of those popped, on the devices that these were on.

        Raises:
            CallOrderError: the state is not hollow.
        """
        self._check_hollow(True, "init_tensors")
        self.insert_tensors(
            [torch.empty_like(place.like, device=place.device) for place in self._leaves(TensorPlaceholder)]
        )

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU; those there already are copied as well, once.

        Raises:
            CallOrderError: the state is hollow.
        """
        self._check_hollow(False, "copy_tensors_to_cpu")
        if self._origins:
            return
        self._origins = [tensor.device for tensor in self._leaves(torch.Tensor)]
        self._replace(lambda tensor, _: _to_cpu(tensor, non_blocking))

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to where `copy_tensors_to_cpu`, or `pop_tensors`, found them.

        Raises:
            CallOrderError: the state is hollow.
        """
        self._check_hollow(False, "restore_tensor_device")
        if self._origins:
            self._replace(lambda tensor, device: tensor.to(device, non_blocking=non_blocking))
            self._origins = []

    def _replace(self, change: Any) -> None:
        origins = iter(self._origins)
        self._nest = _map_tensors(
            lambda tensor: _wrapper_like(tensor)(change(_local(tensor), next(origins))), self._nest
        )

    def _leaves(self, kind: type[_T]) -> list[_T]:
        found: list[_T] = []
        _map_tensors(found.append, self._nest, kind)
        return found

    def _check_hollow(self, expected: bool, what: str) -> None:
        if self._is_hollow != expected:
            state = "hollow: its tensors were taken out" if self._is_hollow else "not hollow: its tensors are in it"
            raise CallOrderError(f"{what} cannot be used, the state is {state}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _to_cpu(tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return cpu_clone(tensor)
    return tensor.to("cpu", non_blocking=non_blocking)


def _wrapper_like(tensor: torch.Tensor) -> Any:
    """Return a function that makes of a plain tensor the kind of tensor that this one is, without its memory."""
    requires_grad = tensor.requires_grad
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    dtensor = None
    if isinstance(tensor, DTensor):
        dtensor = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def wrap(plain: torch.Tensor) -> torch.Tensor:
        wrapped = plain
        if dtensor is not None:
            mesh, placements, shape, stride = dtensor
            wrapped = DTensor.from_local(plain, mesh, placements, run_check=False, shape=shape, stride=stride)
        if is_parameter:
            return torch.nn.Parameter(wrapped, requires_grad)
        return wrapped.requires_grad_() if requires_grad else wrapped

    return wrap


def _map_tensors(change: Callable[[Any], Any], nest: Any, leaf: type = torch.Tensor) -> Any:
    """Return a copy of the containers of ``nest`` in which every leaf of type ``leaf`` is ``change(leaf)``.

    Other leaves are the same objects.
    """
    return tree_map(partial(_mapped, change, leaf), nest, is_leaf=lambda each: type(each) in (OrderedDict, torch.Size))


def _mapped(change: Callable[[Any], Any], leaf: type, value: Any) -> Any:
    if isinstance(value, leaf):
        return change(value)
    if type(value) is OrderedDict:
        made = OrderedDict((key, _map_tensors(change, each, leaf)) for key, each in value.items())
        made.__dict__.update(vars(value))  # `_metadata` of a module's state
        return made
    if is_plain(type(value)):
        changed = {name: _map_tensors(change, each, leaf) for name, each in attributes_of(value).items()}
        return new_instance(type(value), changed)
    return value
