"""`FlashpointCheckpointManager`: Megatron-Bridge's non-persistent checkpoints, in memory and copied to other nodes."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

from megatron.bridge.training.checkpointing import DefaultCheckpointManager
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

from ml_flashpoint.format.arguments import checked_base, checked_integer
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.local import AsyncCallsQueue, AsyncRequest, LocalCheckpointManager, TensorAwareStateDict
from ml_flashpoint.local.replication import CliqueReplicationStrategy

_log = logging.getLogger(__name__)

_LOCAL = "local"


def attach(
    config: ConfigContainer,
    base: str | os.PathLike[str],
    *,
    every_n_steps: int,
    replication_factor: int = 2,
    replication_jump: int | None = None,
) -> None:
    """Have a training save into memory every few steps, and go on from there. Call it before ``pretrain(config, ...)``.

    Durable checkpoints (``checkpoint.save``, ``save_interval``) stay as they are. What resumes is the newer of both.

    Args:
        config: its ``checkpoint`` is changed, and nothing else.
        base: folder of the base container on each node, best on a tmpfs: an absolute path, another one for each job.
        every_n_steps: at least 1.
        replication_factor: nodes that hold each rank's part; 1 for no copies.
        replication_jump: distance of the ranks that hold one another's parts; by default the ranks of a node.

    Raises:
        InvalidArgumentError: an argument is unusable, or ``config.checkpoint.save`` is not set, without which
            Megatron-Bridge makes no checkpoints of any kind.
    """
    checkpoint = config.checkpoint
    if not checkpoint.save:
        text = "must be set: Megatron-Bridge saves nothing without it, not even in memory"
        raise InvalidArgumentError(text, argument="config.checkpoint.save", value=checkpoint.save)
    checkpoint.non_persistent_local_ckpt_dir = os.fspath(checked_base(base))
    checkpoint.non_persistent_save_interval = checked_integer("every_n_steps", every_n_steps, 1)
    checkpoint.replication = checked_integer("replication_factor", replication_factor, 1) > 1
    checkpoint.replication_factor = replication_factor
    if replication_jump is not None:
        checked_integer("replication_jump", replication_jump, 1)
    checkpoint.replication_jump = replication_jump
    checkpoint.non_persistent_ckpt_type = _LOCAL
    manager = FlashpointCheckpointManager
    register_allowed_target_prefix(f"{manager.__module__}.")
    checkpoint.custom_manager_class = f"{manager.__module__}.{manager.__qualname__}"


class FlashpointCheckpointManager(DefaultCheckpointManager):  # type: ignore[misc]
    """The ``custom_manager_class`` that `attach` names.

    Of a configuration with ``non_persistent_ckpt_type="local"`` it makes the manager of local checkpoints; all the rest
    is Megatron-Bridge's own. Those saves never wait for anything but the copy, with ``async_save`` or without.

    Attributes:
        settings: further arguments of `LocalCheckpointManager`, such as ``keep``. A subclass has its own; its name is
            then that of the ``custom_manager_class``.

    Raises:
        InvalidArgumentError: the configuration has no folder for local checkpoints.
    """

    settings: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, checkpoint_config: CheckpointConfig) -> None:
        durable = copy.copy(checkpoint_config)
        durable.non_persistent_ckpt_type = None
        super().__init__(durable)
        self.checkpoint_config = checkpoint_config
        self._local: _LocalManager | None = None
        if checkpoint_config.non_persistent_ckpt_type != _LOCAL:
            return
        base = checkpoint_config.non_persistent_local_ckpt_dir
        if not base:
            argument = "checkpoint.non_persistent_local_ckpt_dir"
            raise InvalidArgumentError("must be an absolute path", argument=argument, value=base)
        cliques = None
        if checkpoint_config.replication:
            jump, factor = checkpoint_config.replication_jump, checkpoint_config.replication_factor
            cliques = CliqueReplicationStrategy.from_replication_params(jump, factor)
        allowed = [MCoreTensorAwareStateDict, *self.settings.get("safe_globals", ())]
        settings = {**self.settings, "safe_globals": allowed}
        self._local = _LocalManager(base, repl_strategy=cliques, **settings)
        self.checkpointing_context["local_checkpoint_manager"] = self._local

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Tell of saves into memory that have ended, too. See ``CheckpointManager.finalize_async_saves``."""
        if self._local is not None:
            self._local.finalize(blocking)
        super().finalize_async_saves(state, blocking, terminate)


class _LocalManager(LocalCheckpointManager):
    """Saves in the background also where Megatron-Bridge's durable saves are synchronous. No save ends the training."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._queue = AsyncCallsQueue()

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Do as `LocalCheckpointManager.save`, asynchronously in any case. What fails is logged."""
        try:
            request = super().save(state_dict, iteration, is_async=True)
            assert request is not None
        except FlashpointError as error:  # which the other ranks wait to be told
            failed: Future[Manifest] = Future()
            failed.set_exception(error)
            request = AsyncRequest(None, (), [partial(self._conclude, iteration, failed)])
        request = request._replace(finalize_fns=[partial(_logged, end) for end in request.finalize_fns])
        if is_async:
            return request
        self._queue.schedule_async_request(request)
        return None

    def finalize(self, blocking: bool) -> None:
        """End the requests of synchronous saves that are over, or, if it may wait, all of them. Collective."""
        _logged(partial(self._queue.maybe_finalize_async_calls, blocking))


def _logged(call: Callable[[], object]) -> None:
    try:
        call()
    except FlashpointError as error:
        _log.error("no checkpoint was saved into memory: %s", error)
