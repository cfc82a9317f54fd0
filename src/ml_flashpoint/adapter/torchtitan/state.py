"""The state of a torchtitan job, as objects to track."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader

from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.tracked import PlaceInData, Stateful

_OF_A_MODULE = ("_parameters", "_buffers", "_non_persistent_buffers_set")


class BareModule(nn.Module):
    """The parameters and buffers of a module, under their own names, without its hooks.

    torchtitan's layers with fused weights have hooks that split these for ``state_dict()``. For that, all ranks gather
    the weights: a save would wait for other ranks, and take the memory of a whole layer. Of FSDP's hooks, the one is
    kept that frees what a forward without a backward has gathered.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        vars(self).update(
            {name: vars(module)[name] for name in _OF_A_MODULE}
        )  # the same dicts: a buffer may be replaced
        if isinstance(module, FSDPModule):
            own: Any = self
            own.register_state_dict_pre_hook(lambda *_: module.reshard())
        for name, child in module._modules.items():
            if child is not None:
                self.add_module(name, BareModule(child))


class LoaderPlace(PlaceInData):
    """The place of one rank in the data.

    The state is that of torchdata, which torchtitan would pickle: nothing pickled is read from a base container.

    Args:
        loader: a torchtitan loader. The loop is over the loader itself.
    """

    def __init__(self, loader: ParallelAwareDataloader) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        of = [self.loader.dp_rank, self.loader.dp_world_size]
        return {"of": of, "own": StatefulDataLoader.state_dict(self.loader)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a place with the next iterator.

        Raises:
            LoadError: it is the place of another data-parallel rank, or of a job with another number of these.
        """
        of = [self.loader.dp_rank, self.loader.dp_world_size]
        if state_dict["of"] != of:
            then, now = (f"data-parallel rank {rank} of {ranks}" for rank, ranks in (state_dict["of"], of))
            text = f"the place in the data is that of {then}, and this rank is now {now}"
            raise LoadError(text, hint="start the job with the parallelism that it was saved with")
        StatefulDataLoader.load_state_dict(self.loader, state_dict["own"])
        self.loader._get_iterator = self._make_iterator

    def _make_iterator(self) -> Any:
        """Make the next iterator. torchdata draws a random number for that, which an undisturbed run does not."""
        del self.loader._get_iterator
        try:
            return self.loader._get_iterator()
        finally:
            if self.restored is not None:
                self.restored.put_back(self)

    def forget(self) -> None:
        """Undo a `load_state_dict` that was part of a load that failed elsewhere."""
        vars(self.loader).pop("_get_iterator", None)
        StatefulDataLoader.load_state_dict(self.loader, {})
        self.loader.next_iter_state, self.restored = None, None


class Together:
    """Several objects with a state, as one."""

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        self._objects = objects

    def state_dict(self) -> dict[str, Any]:
        """Return the states, by name."""
        return {name: each.state_dict() for name, each in self._objects.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand each object its state."""
        for name, each in self._objects.items():
            each.load_state_dict(state_dict[name])
