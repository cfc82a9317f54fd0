"""NeMo's way to versions in memory: a `CheckpointIO`, and its companion for asynchronous saves.

Paths elsewhere go on to the `CheckpointIO` that was there before. Saving and loading are the Megatron-LM adapter's.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from nemo.lightning.io.pl import TrainerContext, _fix_tensors_device
from nemo.utils.callbacks.dist_ckpt_io import AsyncCompatibleCheckpointIO, AsyncFinalizableCheckpointIO

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.tensors import check_copies
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.format.knobs import exit_deadline_s

_log = logging.getLogger(__name__)

CONTEXT_FILE = "context.zip"
"""File of a version that holds NeMo's context folder."""

EXPLICIT = "flashpoint_explicit"
"""Storage option of a save: True if somebody waits for it; False: a schedule's, skipped while there is no memory."""


class MLFlashpointCheckpointIO(AsyncCompatibleCheckpointIO):  # type: ignore[misc]
    """Saves to and loads from memory what lies in the base container, and passes everything else on.

    Args:
        engine: of the base container. It ends with the process.
        alternate: what paths elsewhere are for: the trainer's own.
        trainer: whose context is saved.
        async_save: return requests for what is left to do after staging, instead of doing it.
        always_save_context: save NeMo's context with each version.
    """

    def __init__(
        self,
        engine: Checkpointer,
        alternate: CheckpointIO,
        *,
        trainer: Any = None,
        async_save: bool = True,
        always_save_context: bool = False,
    ) -> None:
        self.engine, self.alternate = engine, alternate
        # No child processes: our requests have a queue of their own, and nothing for a process to do.
        self.save_strategy = MLFlashpointMegatronAsyncSaveStrategy(MemoryStorageWriter(engine), child=False)
        self.async_save, self.always_save_context = async_save, always_save_context
        self._load_strategy = MLFlashpointMegatronLoadStrategy(checkpoint_loader=engine)
        self._trainer = trainer
        self._checked = False
        self._context: dict[str, bytes] | None = None
        atexit.register(self.close)

    @property
    def save_sharded_strategy(self) -> Any:
        """Strategy of paths elsewhere: what NeMo writes ModelOpt's state with, if a model has any."""
        alternate = self.alternate
        if isinstance(alternate, AsyncFinalizableCheckpointIO):
            alternate = alternate.checkpoint_io
        return alternate.save_sharded_strategy

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> AsyncRequest | None:
        """Save a sharded checkpoint. Collective. Return what is left to do, if saves are asynchronous; in the base
        container it is staged, and goes on by itself."""
        if not self.engine.holds(path):
            request: AsyncRequest | None = self.alternate.save_checkpoint(checkpoint, path, storage_options)
            return request
        checks, self._checked = not self._checked, True
        explicit = (storage_options or {}).pop(EXPLICIT, True)
        refused: SaveError | None = None
        try:
            check_copies(checkpoint.get("callbacks"), "callbacks")
        except SaveError as error:  # megatron-core, too, would stumble over it, and leave other ranks waiting
            refused, checkpoint = error, {key: value for key, value in checkpoint.items() if key != "callbacks"}

        def files() -> Mapping[str, bytes]:
            if refused is not None:  # told here, where all ranks learn of it
                raise refused
            return self._context_files() if self.always_save_context else {}

        return save_local_aware_megatron_checkpoint(
            checkpoint,
            path,
            self.save_strategy,
            self.async_save,
            # Collective and slow: the first save shows whether the ranks' shards make up the whole.
            validate_access_integrity=checks,
            files=files,
            explicit=explicit,
        )

    def _context_files(self) -> Mapping[str, bytes]:
        """Return the trainer's context, which does not change, as one file; nothing if NeMo cannot write it."""
        if self._context is None:
            self._context = {}
            try:
                with tempfile.TemporaryDirectory() as folder:
                    context = Path(folder) / "context"
                    TrainerContext.from_trainer(self._trainer).io_dump(context, yaml_attrs=["model"])
                    self._context = {
                        CONTEXT_FILE: Path(shutil.make_archive(f"{context}-all", "zip", context)).read_bytes()
                    }
            except Exception as error:  # of whatever kind what the user's objects consist of raises
                _log.error("checkpoints in memory are saved without NeMo's context: %r", error)
        return self._context

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        sharded_state_dict: dict[str, Any] | None = None,
        map_location: Any = None,
        strict: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Load a sharded checkpoint. Collective. ``strict`` is as for NeMo's `MegatronCheckpointIO`."""
        if not self.engine.holds(path):
            found: dict[str, Any] = self.alternate.load_checkpoint(
                path, sharded_state_dict=sharded_state_dict, map_location=map_location, strict=strict, **options
            )
            return found
        if strict is None or isinstance(strict, bool):
            strict = StrictHandling.LOG_ALL if strict is False else StrictHandling.ASSUME_OK_UNEXPECTED
        loaded: dict[str, Any] = dist_checkpointing.load(
            sharded_state_dict=sharded_state_dict,
            checkpoint_dir=str(path),
            sharded_strategy=self._load_strategy,
            common_strategy=TorchCommonLoadStrategy(),
            strict=strict,
        )
        return _fix_tensors_device(loaded) if cuda.device_count() else loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, unless it lies in the base container: those go when newer ones are verified."""
        if not self.engine.holds(path):
            self.alternate.remove_checkpoint(path)

    def teardown(self) -> None:
        """Give saves under way time to get their copies, and tear down what paths elsewhere are for."""
        if not self.engine.wait(exit_deadline_s()):
            _log.warning("the newest save may lack copies on other nodes")
        self.alternate.teardown()

    def close(self) -> None:
        """Let saves in flight finish, and the newest version be persisted, and end. Versions stay. Safe to call
        twice."""
        atexit.unregister(self.close)
        self.save_strategy.stop_watching()
        self.engine.close(exit_deadline_s())


class MLFlashpointAsyncFinalizableCheckpointIO(AsyncFinalizableCheckpointIO):  # type: ignore[misc]
    """Finalizes asynchronous saves: ours one by one, the trainer's in their queue.

    Finalizing ours only tells all ranks what became of a save. So it is done before the next one and at the end, where
    it waits for nothing, and not at every step, where all ranks would have to agree.
    """

    def __init__(self, checkpoint_io: MLFlashpointCheckpointIO) -> None:
        super().__init__(checkpoint_io)
        self._last: AsyncRequest | None = None  # of ours, until it is finalized

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save. Collective. In the base container, it is staged on return, and nothing else is waited for."""
        ours: MLFlashpointCheckpointIO = self.checkpoint_io
        if not ours.engine.holds(path):
            ours.alternate.save_checkpoint(checkpoint, path, storage_options)
            return
        finalize = (storage_options or {}).pop("finalize_fn", None)
        self._finalize_ours()
        request = ours.save_checkpoint(checkpoint, path, storage_options)
        self._last = request
        if request is not None and finalize is not None:
            request.add_finalize_fn(finalize)
        elif finalize is not None:  # ours are not asynchronous
            finalize()

    def maybe_finalize_save_checkpoint(self, blocking: bool = False) -> bool:
        """Finalize what can be; with ``blocking``, wait for all saves. Return True if a save was finalized."""
        finalized = self._finalize_ours() if blocking else False
        alternate = self.checkpoint_io.alternate
        if isinstance(alternate, AsyncFinalizableCheckpointIO):
            finalized = bool(alternate.maybe_finalize_save_checkpoint(blocking)) or finalized
        return finalized

    def _finalize_ours(self) -> bool:
        request, self._last = self._last, None
        for finalize in [] if request is None else request.finalize_fns:
            finalize()
        return request is not None

    def teardown(self) -> None:
        """Tear both down. A save that is not finalized is so because training has failed: ranks may be lost."""
        self._last = None
        self.checkpoint_io.teardown()
