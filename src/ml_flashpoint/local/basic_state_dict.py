"""`TensorAwareStateDict`: a state whose tensors can be told from their structure. `BasicTensorAwareStateDict`: any
nesting of containers with tensors in it, as such a state."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy.cpu import cpu_clone
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local.errors import CallOrderError
from ml_flashpoint.state.archive import PLAIN_BASES, attributes_of, is_namedtuple, is_plain, new_instance


class TensorAwareStateDict:
    """A state to checkpoint, as `LocalCheckpointManager.save` takes it and `load` returns it: its attributes.

    These may nest in any way that `BasicTensorAwareStateDict` describes. A state is stored by them, and made again
    without its constructor. Subclasses may have other ways to move their tensors. Of a DTensor, the methods about
    tensors mean its local shard.

    A *hollow* state has had its tensors taken out, and not put back. Methods about tensors raise a `CallOrderError`
    while it is; those that put tensors in, while it is not.
    """

    _is_hollow = False
    _origins: Sequence[torch.device] = ()
    """Of each tensor, in order, the device that it is away from; empty if none is."""

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
        return iter(self._locals("tensors"))

    def values(self) -> ValuesView[Any]:
        """Return the values of the attributes."""
        return vars(self).values()

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out, and return them."""
        popped = self._locals("pop_tensors")
        self._origins = self._origins or [tensor.device for tensor in popped]
        self._replace([torch.empty_like(tensor, device="meta") for tensor in popped])
        self._is_hollow = True
        return popped

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places of those popped. Raises an `InvalidArgumentError` if they do not fit there."""
        given = list(tensor_data)
        forms = [(tensor.dtype, tuple(tensor.shape)) for tensor in given]
        expected = [(place.dtype, tuple(place.shape)) for place in self._locals("insert_tensors", hollow=True)]
        if forms != expected:
            raise InvalidArgumentError(f"must be tensors of {expected}", argument="tensor_data", value=forms)
        self._replace(given)
        self._is_hollow = False
        if [tensor.device.type for tensor in given] == [origin.type for origin in self._origins]:
            self._origins = ()

    def init_tensors(self) -> None:
        """Put new, uninitialized tensors in the places of those popped, on the devices that these were on."""
        places = zip(self._locals("init_tensors", hollow=True), self._origins, strict=True)
        self.insert_tensors([torch.empty_like(place, device=device) for place, device in places])

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU, once. Those of a device may be under way, with ``non_blocking``."""
        tensors = self._locals("copy_tensors_to_cpu")
        if not self._origins:
            self._origins = [tensor.device for tensor in tensors]
            self._replace(
                cpu_clone(tensor) if tensor.is_cpu else tensor.to("cpu", non_blocking=non_blocking)
                for tensor in tensors
            )

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to where `copy_tensors_to_cpu`, or `pop_tensors`, found them."""
        tensors = self._locals("restore_tensor_device")
        if self._origins:
            places = zip(tensors, self._origins, strict=True)
            self._replace([tensor.to(device, non_blocking=non_blocking) for tensor, device in places])
            self._origins = ()

    def _locals(self, what: str, *, hollow: bool = False) -> list[torch.Tensor]:
        """Return the tensors in order, of DTensors this rank's shards, for a method that needs them in or out."""
        if self._is_hollow != hollow:
            state = "hollow: its tensors were taken out" if self._is_hollow else "not hollow: its tensors are in it"
            raise CallOrderError(f"{what} cannot be used, the state is {state}")
        found: list[torch.Tensor] = []
        map_tensors(lambda tensor, _: found.append(tensor), vars(self))
        return [each.to_local().detach() if isinstance(each, DTensor) else each.detach() for each in found]

    def _replace(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places of those there, as parameters or DTensors where these are."""
        remaining = iter(tensors)

        def put(place: torch.Tensor, _: str) -> torch.Tensor:
            layout = None
            if isinstance(place, DTensor):
                layout = place.device_mesh, place.placements, place.shape, place.stride()
            return rewrap(next(remaining), flags_of(place), layout)

        vars(self).update(map_tensors(put, vars(self)))


PLAIN_BASES.append(TensorAwareStateDict)


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """A state of dicts, lists, tuples, namedtuples and dataclasses in any nesting, with tensors anywhere in it.

    Tensors may be on any device; parameters and DTensors stay what they are. The containers of ``state_dict`` are
    copied here; the tensors are shared until `copy_tensors_to_cpu`. Raises an `InvalidArgumentError` if ``state_dict``
    is tensor-aware already, or contains itself.
    """

    def __init__(self, state_dict: Any) -> None:
        if isinstance(state_dict, TensorAwareStateDict):
            text = "is tensor-aware already: save it as it is"
            raise InvalidArgumentError(text, argument="state_dict", value=type(state_dict))
        self._nest = map_tensors(lambda tensor, _: tensor, state_dict)

    @property
    def state_dict(self) -> Any:
        """State; while it is hollow, with tensors on the meta device, which have no memory."""
        return self._nest


def flags_of(tensor: torch.Tensor) -> int:
    """Return a number for what `rewrap` restores: 1 for a tensor that wants a gradient, plus 2 for a parameter."""
    return int(tensor.requires_grad) + 2 * isinstance(tensor, torch.nn.Parameter)


def rewrap(plain: torch.Tensor, flags: int, layout: tuple[Any, ...] | None = None) -> torch.Tensor:
    """Return a tensor as a parameter or with a gradient, as `flags_of` says, or as the local shard of a DTensor of this
    mesh, placements, shape and strides."""
    if layout is not None:
        mesh, placements, shape, stride = layout
        plain = DTensor.from_local(plain, mesh, placements, run_check=False, shape=shape, stride=tuple(stride))
    if flags & 2:
        return torch.nn.Parameter(plain, bool(flags & 1))
    return plain.detach().requires_grad_() if flags & 1 else plain


def map_tensors(change: Callable[[torch.Tensor, str], Any], nest: Any) -> Any:
    """Return a copy of the containers of a nest in which each tensor is ``change(tensor, path)``. Raises an
    `InvalidArgumentError` if it contains itself."""
    try:
        return _mapped(change, nest, "")
    except RecursionError:
        text = "is nested too deeply, or contains itself"
        raise InvalidArgumentError(text, argument="state_dict", value=type(nest)) from None


def _mapped(change: Callable[[torch.Tensor, str], Any], nest: Any, path: str) -> Any:
    if isinstance(nest, torch.Tensor):
        return change(nest, path)
    kind, items = type(nest), None
    if kind in (dict, OrderedDict, defaultdict):
        items = nest.items()
    elif kind in (list, tuple, deque) or is_namedtuple(kind):
        items = enumerate(nest)
    elif is_plain(kind):
        items = attributes_of(nest).items()
    if items is None:
        return nest
    changed = {key: _mapped(change, each, f"{path}.{key}" if path else str(key)) for key, each in items}
    if isinstance(nest, dict):
        nest = copy.copy(nest)  # with what it has besides, as the `_metadata` of a module's state
        nest.update(changed)
        return nest
    if isinstance(nest, tuple):
        return tuple.__new__(kind, changed.values())
    if isinstance(nest, deque):
        return deque(changed.values(), nest.maxlen)
    return list(changed.values()) if kind is list else new_instance(kind, changed)
