"""The state of a DeepSpeed engine, beside what a `Flashpoint` tracks by itself.

A module's parameters and a plain optimizer of torch are tracked as ever. The rest is one dictionary: counters, buffers,
and the state dict of an optimizer of DeepSpeed's own, of which each rank has a partition (ZeRO). It goes back through
``load_state_dict`` of that optimizer, as in ``engine.load_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.constants import PARAM_SLICE_MAPPINGS, UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime.utils import is_optimized_parameter
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, ReshardError
from ml_flashpoint.state.archive import plain_modes
from ml_flashpoint.state.dictionary import OWN, SHARED, DictionaryState, take_apart
from ml_flashpoint.state.parameters import AS_SAVED, expected_tensors
from ml_flashpoint.state.tracked import PACKED, TrackedLoad

_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_LOSS_SCALER = "loss_scaler"
# Read by nothing but the universal checkpoint, for which they are made of the engine's own.
_LEFT_OUT = (PARAM_SLICE_MAPPINGS, UNIVERSAL_CHECKPOINT_INFO)


def _has_nvme(engine: Any) -> bool:
    parts = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    return any(each is not None and each.device == "nvme" for each in parts)


_REFUSED: Mapping[str, Callable[[Any], object]] = {
    "pipeline parallelism": lambda engine: engine.pipeline_parallelism,
    "tensor parallelism": lambda engine: engine.mp_world_size > 1,
    "a mixture of experts": lambda engine: engine.has_moe_layers,
    "base weights that LoRA shards": lambda engine: engine.optimized_linear_base_weight_sharding,
    "elastic_checkpoint": lambda engine: engine.zero_optimization() and engine.zero_elastic_checkpoint(),
    "offloading to NVMe": _has_nvme,
    "ZenFlow": lambda engine: engine.zenflow,
    "SuperOffload": lambda engine: engine.super_offload(),
    "quantized weights": lambda engine: engine.zero_quantized_nontrainable_weights(),
    "curriculum learning": lambda engine: engine.curriculum_learning_enabled(),
    "random LTD": lambda engine: engine.random_ltd_enabled(),
}
"""Features of engines with state that is elsewhere, or of another form, or not tried."""


def check_engine(engine: object) -> None:
    """Raise an `InvalidArgumentError` if a value is no engine, or one that is not supported."""
    if not isinstance(engine, DeepSpeedEngine):
        hint = "pass the first of what deepspeed.initialize() returns"
        raise InvalidArgumentError("must be a DeepSpeedEngine", argument="engine", value=engine, hint=hint)
    if engine.basic_optimizer is None:
        raise InvalidArgumentError("has no optimizer", argument="engine", value=engine)
    for name, uses in _REFUSED.items():
        if uses(engine):
            raise InvalidArgumentError(f"uses {name}, which is not supported", argument="engine", value=engine)


class EngineState(DictionaryState):
    """Tracks the dictionary of an engine, once there is one, besides what is added."""

    title = "engine"
    _engine: Any = None

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Track an engine that `check_engine` has accepted."""
        self._engine, self.make = engine, self._dictionary

    # ---- saving -------------------------------------------------------------------------------------------

    def part_of(self, path: str) -> str | None:
        """See `DictionaryState.part_of`. Without ZeRO, all ranks have the same optimizer."""
        return SHARED if path.startswith("optimizer.") and not self._engine.zero_optimization() else OWN

    def _dictionary(self) -> dict[str, Any]:
        engine, module, optimizer = self._engine, self._engine.module, self._engine.optimizer
        state: dict[str, Any] = {"layout": self._layout(), "counts": {name: getattr(engine, name) for name in _COUNTS}}
        # Ranks have buffers of their own: nobody makes those of a BatchNorm the same.
        state["buffers"] = buffers = module.state_dict()
        for name, _ in module.named_parameters(remove_duplicate=False):
            buffers.pop(name, None)
        if engine.zero_optimization_partition_weights():
            state["frozen"] = {name: parameter.ds_tensor for name, parameter in self._frozen()}
        if not isinstance(optimizer, Optimizer):
            state["optimizer"] = own = optimizer.state_dict()
            for name in _LEFT_OUT:
                own.pop(name, None)
            if _LOSS_SCALER in own:
                own[_LOSS_SCALER] = dict(vars(own[_LOSS_SCALER]))
        return state

    def _layout(self) -> dict[str, str]:
        """Return what must be as it was."""
        engine = self._engine
        return {
            "zero_optimization.stage": str(engine.zero_optimization_stage()),
            "optimizer": type(engine.optimizer).__name__,
            "data type": str(engine.get_data_types()[0]),
        }

    def _frozen(self) -> Iterable[tuple[str, Any]]:
        return (
            (name, each) for name, each in self._engine.module.named_parameters() if not is_optimized_parameter(each)
        )

    def expected_bytes(self) -> int:
        """See `TrackedState.expected_bytes`."""
        engine = self._engine
        own = list(take_apart(self._dictionary())[1].values())
        if not isinstance(engine.optimizer, Optimizer) and not engine.basic_optimizer.state:
            own += expected_tensors(engine.basic_optimizer)
        return super().expected_bytes() + sum(tensor.nbytes for tensor in own)

    # ---- loading ------------------------------------------------------------------------------------------

    def places(self, metadata: Metadata, source_rank: int, names: set[str]) -> dict[str, Any]:
        """See `TrackedState.places`. Raises a `ReshardError` if another number of ranks has saved partitions."""
        before = sum(
            key.startswith(f"{PACKED}.") and key.endswith(f".{self.title}") for key in metadata.state_dict_metadata
        )
        if self._engine.zero_optimization() and before not in (0, self.world_size):
            raise ReshardError(
                f"saved by {before} ranks, loaded by {self.world_size}, and under ZeRO each has a partition of its own",
                rank=self.rank,
                hint=f"start {before} ranks, or go on from a universal checkpoint of DeepSpeed's",
            )
        return super().places(metadata, source_rank, names)

    def apply(self, target: TrackedLoad, states: Mapping[str, Any]) -> None:
        """See `TrackedState.apply`. Gives the engine its state; `settle` does the rest."""
        saved, now = states[self.title]["layout"], self._layout()
        if others := [
            f"{name} was {saved.get(name)}, and is {value}" for name, value in now.items() if saved.get(name) != value
        ]:
            raise LoadError("; ".join(others), rank=self.rank, hint=AS_SAVED)
        super().apply(target, states)
        with plain_modes(), torch.no_grad():
            self._give(self.rest.take())

    def _give(self, state: dict[str, Any]) -> None:
        engine, optimizer = self._engine, self._engine.optimizer
        is_sharded = engine.zero_optimization_partition_weights()
        if is_sharded:
            optimizer.checkpoint_event_prologue()
        unknown = engine.module.load_state_dict(state["buffers"], strict=False).unexpected_keys
        if unknown:
            raise LoadError(f"the model has no {', '.join(unknown)}", rank=self.rank, hint=AS_SAVED)
        if is_sharded:
            for name, parameter in self._frozen():
                parameter.ds_tensor.copy_(state["frozen"][name])
        if (own := state.get("optimizer")) is not None:
            if _LOSS_SCALER in own:
                vars(optimizer.loss_scaler).update(own[_LOSS_SCALER])
                own[_LOSS_SCALER] = optimizer.loss_scaler
            if engine.zero_optimization():
                # One for each rank, of which it takes its own.
                every = [own] * dist.get_world_size(optimizer.dp_process_group)
                optimizer.load_state_dict(every, load_optimizer_states=True, load_from_fp32_weights=True)
            else:
                optimizer.load_state_dict(own)
        for name in _COUNTS:
            setattr(engine, name, state["counts"][name])

    def settle(self) -> None:
        """Gather what ZeRO stage 3 keeps whole, after a load. Collective."""
        if self._engine.zero_optimization_partition_weights():
            self._engine.optimizer.checkpoint_event_epilogue()
