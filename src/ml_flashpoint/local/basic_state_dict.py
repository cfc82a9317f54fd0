"""`BasicTensorAwareStateDict`: any nesting of containers with tensors in it, as a `TensorAwareStateDict`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy.cpu import cpu_clone
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.errors import CallOrderError
from ml_flashpoint.state.archive import attributes_of, is_plain, new_instance
from ml_flashpoint.state.private import tree_map


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
    wrap: Callable[[torch.Tensor], torch.Tensor]


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
        """Tensors, in the order of the nesting."""
        self._check_hollow(False, "tensors")
        return iter([_local(tensor) for tensor in self._leaves(torch.Tensor)])

    def values(self) -> ValuesView[Any]:
        """Return the values of the state, if it is a mapping."""
        return self._nest.values() if isinstance(self._nest, Mapping) else super().values()

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out, leaving placeholders, and return them."""
        self._check_hollow(False, "pop_tensors")
        popped: list[torch.Tensor] = []
        origins = iter(self._origins or [tensor.device for tensor in self._leaves(torch.Tensor)])

        def take(tensor: torch.Tensor) -> TensorPlaceholder:
            popped.append(_local(tensor))
            return TensorPlaceholder(torch.empty_like(popped[-1], device="meta"), next(origins), rewrap_like(tensor))

        self._nest = _map_tensors(take, self._nest)
        self._origins, self._is_hollow = [], True
        return popped

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places of those popped, in their order.

        Raises:
            InvalidArgumentError: they are too many or too few, or one has another dtype or shape. The state stays as
                it was.
        """
        self._check_hollow(True, "insert_tensors")
        given, places = list(tensor_data), self._leaves(TensorPlaceholder)
        forms = [(tensor.dtype, tuple(tensor.shape)) for tensor in given]
        expected = [(place.like.dtype, tuple(place.like.shape)) for place in places]
        if forms != expected:
            raise InvalidArgumentError(f"must be tensors of {expected}", argument="tensor_data", value=forms)
        remaining = iter(given)
        self._nest = _map_tensors(lambda place: place.wrap(next(remaining)), self._nest, TensorPlaceholder)
        self._is_hollow = False
        if any(tensor.device.type != place.device.type for tensor, place in zip(given, places, strict=True)):
            self._origins = [place.device for place in places]

    def init_tensors(self) -> None:
        """Put new, uninitialized tensors in the places of those popped, on the devices that these were on."""
        self._check_hollow(True, "init_tensors")
        self.insert_tensors(
            [torch.empty_like(place.like, device=place.device) for place in self._leaves(TensorPlaceholder)]
        )

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU; those there already are copied as well, once."""
        self._check_hollow(False, "copy_tensors_to_cpu")
        if not self._origins:
            self._origins = [tensor.device for tensor in self._leaves(torch.Tensor)]
            self._replace(
                lambda tensor, device: (
                    cpu_clone(tensor) if device.type == "cpu" else tensor.to("cpu", non_blocking=non_blocking)
                )
            )

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to where `copy_tensors_to_cpu`, or `pop_tensors`, found them."""
        self._check_hollow(False, "restore_tensor_device")
        if self._origins:
            self._replace(lambda tensor, device: tensor.to(device, non_blocking=non_blocking))
            self._origins = []

    def _replace(self, change: Callable[[torch.Tensor, torch.device], torch.Tensor]) -> None:
        origins = iter(self._origins)
        self._nest = _map_tensors(lambda tensor: rewrap_like(tensor)(change(_local(tensor), next(origins))), self._nest)

    def _leaves(self, kind: type) -> list[Any]:
        found: list[Any] = []
        _map_tensors(found.append, self._nest, kind)
        return found

    def _check_hollow(self, expected: bool, what: str) -> None:
        if self._is_hollow != expected:
            state = "hollow: its tensors were taken out" if self._is_hollow else "not hollow: its tensors are in it"
            raise CallOrderError(f"{what} cannot be used, the state is {state}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def rewrap_like(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes of a plain tensor the kind of tensor that this one is, without its memory."""
    layout = None
    if isinstance(tensor, DTensor):
        layout = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return partial(rewrap, flags=flags_of(tensor), layout=layout)


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
