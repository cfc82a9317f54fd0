"""States that the crucible saves and loads: what they are made of, and what every bit of them is at every step.

Owns the content: a function of names, step and life, so that any process can tell whether what it has loaded is what
was saved, and by whom. Shapes, dtypes and shardings are drawn elsewhere; here they are made.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from tests.support.tensors import dtype_name, raw

TRAINABLE = ("float32", "float64", "bfloat16", "float16")
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "none": ()}
STORED = (*TRAINABLE, "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int64", "bool", "complex64", "complex128")


@dataclass(frozen=True)
class Leaf:
    """One tensor of a model.

    Attributes:
        name: where it is, with dots for modules in modules.
        role: parameter, frozen, buffer, tied (to the parameter called ``of``), or own: not of the model, but of the
            rank with the number ``of`` alone.
        shape, dtype: what it is like.
        how: plain, a view of something larger (column, slice, reversed dimensions), or sparse.
    """

    name: str
    role: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    how: str = "plain"
    of: str = ""


@dataclass(frozen=True)
class Spec:
    """A state, but for its content.

    Attributes:
        leaves: the model's tensors.
        grown: more of them, one each time that the structure changes.
        sharding: none, ddp, fsdp2, hsdp, tp or mixed.
        optimizer: adamw, sgd or none.
        payload: bytes of what is no tensor; at each change of structure it is another tenth of it.
    """

    leaves: tuple[Leaf, ...]
    grown: tuple[Leaf, ...] = ()
    sharding: str = "none"
    optimizer: str = "adamw"
    payload: int = 100


def _empty(leaf: Leaf) -> torch.Tensor:
    dtype = getattr(torch, leaf.dtype)
    if leaf.how == "sparse":
        return torch.sparse_coo_tensor(size=leaf.shape, dtype=dtype, check_invariants=True)
    if leaf.how == "column" and len(leaf.shape) == 1:
        return torch.zeros(*leaf.shape, 3, dtype=dtype)[:, 1]
    if leaf.how == "slice":
        return torch.zeros(*leaf.shape[:-1], leaf.shape[-1] + 5, dtype=dtype)[..., 2:-3]
    if leaf.how == "reversed":
        return torch.zeros(*reversed(leaf.shape), dtype=dtype).permute(*reversed(range(len(leaf.shape))))
    return torch.zeros(leaf.shape, dtype=dtype)


def content(name: str, shape: tuple[int, ...], dtype: torch.dtype, step: int, life: int) -> torch.Tensor:
    """The whole tensor of a name at a step of a life."""
    count = math.prod(shape) * dtype.itemsize
    octets = np.random.Generator(np.random.SFC64(zlib.crc32(f"{name} {step} {life}".encode()))).bytes(count)
    if not octets:  # NumPy's empty arrays share an address, and torch.save refuses two dtypes at one
        return torch.empty(shape, dtype=dtype)
    values = np.frombuffer(bytearray(octets), np.uint8)
    return torch.from_numpy(values & 1 if dtype is torch.bool else values).view(dtype).view(shape)


def sparse_content(name: str, shape: tuple[int, ...], dtype: torch.dtype, step: int, life: int) -> torch.Tensor:
    """The same of a sparse tensor: how much is specified in it differs from step to step."""
    count = min(math.prod(shape), zlib.crc32(f"{name} {step} {life}".encode()) % 500)
    at = torch.stack(torch.unravel_index(torch.arange(count), shape)) if count else torch.empty(len(shape), 0).long()
    return torch.sparse_coo_tensor(at, content(name, (count,), dtype, step, life), shape, is_coalesced=True)


def bits(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor, as bytes."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return raw(tensor.indices()) + raw(tensor.values())
    return raw(tensor.contiguous().clone(memory_format=torch.contiguous_format))


class Holder:
    """A state on this rank. Collective, where it is sharded.

    Args:
        spec: what it is.
        variant: how often its structure has changed.
    """

    def __init__(self, spec: Spec, variant: int, rank: int, world_size: int) -> None:
        self._spec, self._rank, self._world_size, self._variant = spec, rank, world_size, 0
        self.net = nn.Module()
        for leaf in spec.leaves:
            self._register(leaf)
        self.model: nn.Module = self.net
        self._shard(spec.sharding, world_size)
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.optimizer = self._optimizer(spec.optimizer, trained)
        self.notes = Notes(rank)
        while self._variant < variant:
            self.grow()

    def _register(self, leaf: Leaf) -> None:
        *path, name = leaf.name.split(".")
        module = self.net
        for each in path:
            if each not in dict(module.named_children()):
                module.add_module(each, nn.Module())
            module = module.get_submodule(each)
        if leaf.role == "tied":
            module.register_parameter(name, self.net.get_parameter(leaf.of))
        elif leaf.role == "buffer":
            module.register_buffer(name, _empty(leaf))
        else:
            module.register_parameter(name, nn.Parameter(_empty(leaf), requires_grad=leaf.role == "parameter"))

    def _shard(self, how: str, world_size: int) -> None:
        if how == "ddp" and any(True for p in self.net.parameters() if p.requires_grad):
            self.model = DistributedDataParallel(self.net, init_sync=False)
        elif how in ("fsdp2", "mixed"):
            mesh = init_device_mesh("cpu", (world_size,))
            for child in self.net.children():
                fully_shard(child, mesh=mesh)
            if how == "fsdp2":
                fully_shard(self.net, mesh=mesh)
        elif how == "hsdp":
            inner = 2 if world_size % 2 == 0 else 1
            names = ("replicate", "shard")
            fully_shard(self.net, mesh=init_device_mesh("cpu", (world_size // inner, inner), mesh_dim_names=names))
        elif how == "tp":
            mesh = init_device_mesh("cpu", (world_size,))
            for module in self.net.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    along = Shard(parameter.dim() - 1) if parameter.dim() else Replicate()
                    split = distribute_tensor(parameter.detach(), mesh, [along])
                    module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))

    def _optimizer(self, kind: str, trained: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        if kind == "none" or not trained:
            return None
        made = torch.optim.AdamW(trained, lr=0.1) if kind == "adamw" else torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        for parameter in trained:  # what the first step would make, which of DTensors takes its time
            state = {name: torch.zeros_like(parameter.detach()) for name in MOMENTS[kind]}
            made.state[parameter] = {"step": torch.tensor(1.0), **state} if kind == "adamw" else state
        return made

    def grow(self) -> None:
        """Change the structure, as all ranks do."""
        if self._spec.grown[self._variant].role != "own":
            self._register(self._spec.grown[self._variant])
        self._variant += 1

    def adopt(self, variant: int) -> None:
        """Loaded is what differs from this in what is no tensor of the model, or has no elements, if in anything."""
        between = self._spec.grown[min(variant, self._variant) : max(variant, self._variant)]
        tensors = [leaf for leaf in between if leaf.role != "own"]
        lost = variant < self._variant or any(0 not in leaf.shape for leaf in tensors)
        assert not (tensors and lost), f"structure {variant} was loaded into {self._variant}"
        for leaf in tensors:
            self._register(leaf)
        self._variant = variant

    @property
    def variant(self) -> int:
        """How often the structure has changed."""
        return self._variant

    # ---- content ------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, by the first of its names."""
        seen: set[int] = set()
        for name, tensor in self.net.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"model.{name}", tensor
        if self.optimizer is not None:
            for name, parameter in self.net.named_parameters():
                for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor):
                        yield f"optimizer.{name}.{key}", value

    def fill(self, step: int, life: int) -> None:
        """Give everything the content of a step."""
        with torch.no_grad():
            for name, tensor in self.tensors():
                local, wanted = self._local(name, tensor, step, life)
                local.copy_(wanted)
        self.notes.fill(step, life, self._variant, self._spec, self._world_size)
        torch.default_generator.manual_seed(step * 1000 + life * 10 + self._rank)

    def _local(self, name: str, tensor: torch.Tensor, step: int, life: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of a tensor, and what is to be in it."""
        if tensor.layout is torch.sparse_coo:  # what `detach` gives would no longer be it once it is filled
            return tensor, sparse_content(name, tuple(tensor.shape), tensor.dtype, step, life)
        whole = content(name, tuple(tensor.shape), tensor.dtype, step, life)
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return tensor, whole
        shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tensor.to_local()
        index = tuple(slice(begin, begin + length) for begin, length in zip(offsets, shape, strict=True))
        return local, whole[index].reshape(local.shape)

    def check(self, saved_by: Mapping[tuple[int, int], int]) -> tuple[int, int]:
        """Compare everything, bit for bit, with what it was when it was saved; its step and life.

        Args:
            saved_by: how many ranks saved a step in a life; what belongs to one rank is that of this one modulo that.
        """
        step, life = self.notes.check(self._variant, self._spec, saved_by, self._world_size)
        for name, tensor in self.tensors():
            local, wanted = self._local(name, tensor, step, life)
            if bits(local) != bits(wanted):
                raise AssertionError(
                    f"{name}, {tuple(tensor.shape)} of {dtype_name(tensor.dtype)}, is not what was saved at"
                    f" step {step} in life {life}, {_who(name, local, tensor, life)}"
                )
        return step, life


def _who(name: str, local: torch.Tensor, tensor: torch.Tensor, lives: int) -> str:
    """Which other save the content is of, for the message of an error."""
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
        return "sharded, or sparse"
    for life in range(lives + 1):
        for step in range(60):
            if raw(local) == raw(content(name, tuple(tensor.shape), tensor.dtype, step, life)):
                return f"but at step {step} in life {life}"
    return "nor at any other"


@dataclass
class Notes:
    """What is no tensor, and belongs to one rank."""

    rank: int
    state: dict[str, Any] = field(default_factory=dict)

    def fill(self, step: int, life: int, variant: int, spec: Spec, world_size: int) -> None:
        payload = spec.payload * (10 - variant) // 10
        own = [leaf for leaf in spec.grown[:variant] if leaf.role == "own" and int(leaf.of) % world_size == self.rank]
        self.state = {
            "step": step,
            "life": life,
            "rank": self.rank,
            "variant": variant,
            "payload": content("payload", (payload,), torch.uint8, step, life).numpy().tobytes(),
            "array": np.arange(payload % 50, dtype=np.int16) + step,
            "tensor": content("notes", (payload // 2,), torch.uint8, step, life),
            "own": {leaf.name: content(leaf.name, leaf.shape, getattr(torch, leaf.dtype), step, life) for leaf in own},
        }

    def check(
        self, variant: int, spec: Spec, saved_by: Mapping[tuple[int, int], int], world_size: int
    ) -> tuple[int, int]:
        step, life = int(self.state["step"]), int(self.state["life"])
        world_size = saved_by.get((step, life), world_size)
        expected = Notes(self.rank % world_size)
        expected.fill(step, life, variant, spec, world_size)
        assert list(self.state) == list(expected.state), f"other keys: {list(self.state)}"
        assert list(self.state["own"]) == list(expected.state["own"]), f"other keys: {list(self.state['own'])}"
        for key, value in (expected.state | expected.state["own"]).items():
            found = (self.state | self.state["own"])[key]
            if isinstance(value, torch.Tensor):
                same = found.dtype == value.dtype and found.shape == value.shape and raw(found) == raw(value)
            elif isinstance(value, np.ndarray):
                same = found.dtype == value.dtype and bool(np.array_equal(found, value))
            else:
                same = key == "own" or bool(found == value)
            if not same:
                raise AssertionError(f"{key} is not what was saved at step {step} in life {life}: {str(found)[:80]}")
        return step, life

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
