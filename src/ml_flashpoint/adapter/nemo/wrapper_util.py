"""`wrap_trainer_and_auto_resume_with_mlflashpoint`: the one call of a recipe, and the `AutoResume` that it returns."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from nemo.lightning.pytorch.strategies import MegatronStrategy
from nemo.lightning.resume import AutoResume, _try_restore_tokenizer
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO, AsyncFinalizerCallback

from ml_flashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback, flashpoint_io_of
from ml_flashpoint.adapter.nemo.checkpoint_io import (
    CONTEXT_FILE,
    MLFlashpointAsyncFinalizableCheckpointIO,
    MLFlashpointCheckpointIO,
)
from ml_flashpoint.config import Config
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.arguments import checked_base, checked_bool, ignored
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, NothingLoadableError
from ml_flashpoint.format.files import make_private
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.ranks.rank_group import rank_group

_log = logging.getLogger(__name__)

_CONTEXT_FOLDER = "nemo-context"


def wrap_trainer_and_auto_resume_with_mlflashpoint(
    trainer: Any,
    flashpoint_base_container: str | os.PathLike[str],
    async_save: bool,
    default_auto_resume: AutoResume | None = None,
    always_save_context: bool = False,
    write_thread_count: int = 1,
    initial_write_buffer_size_bytes: int = 16 << 30,
    *,
    use_optimized_save: bool | None = None,
    use_cached_ckpt_structure: bool | None = None,
    use_fully_parallel_wrapper: bool | None = None,
    **settings: Any,
) -> AutoResume | None:
    """Let a trainer save into memory and go on from there. Collective; processes must be set up.

    Long-term checkpoints go on as before. Wrapping a trainer again is harmless.

    Args:
        trainer: a trainer with NeMo's `MegatronStrategy`.
        flashpoint_base_container: that of `MLFlashpointCheckpointCallback`.
        async_save: True if saves return when the state is staged.
        default_auto_resume: what to go on from when memory has nothing.
        always_save_context: save NeMo's context with each version, too.
        write_thread_count, initial_write_buffer_size_bytes, use_optimized_save, use_cached_ckpt_structure,
            use_fully_parallel_wrapper: accepted for recipes that pass them, and ignored.
        settings: ``keep``, ``persist``, ``persist_every``, ``persist_keep``, ``persist_bytes_per_s``, ``grace_s`` and
            others: see `Config.of`.

    Returns:
        What to use in place of ``default_auto_resume``; that itself, if the trainer's callback is not enabled.

    Raises:
        InvalidArgumentError: an argument is unusable or the trainer is not supported; says why.
        FlashpointError: ranks lost each other.
    """
    ignored(
        "wrap_trainer_and_auto_resume_with_mlflashpoint",
        write_thread_count=None if write_thread_count == 1 else write_thread_count,
        use_optimized_save=use_optimized_save,
        use_cached_ckpt_structure=use_cached_ckpt_structure,
        use_fully_parallel_wrapper=use_fully_parallel_wrapper,
    )
    base, config = checked_base(flashpoint_base_container, "flashpoint_base_container"), Config.of(**settings)
    checked_bool("async_save", async_save)
    checked_bool("always_save_context", always_save_context)
    _check_supported(trainer, default_auto_resume)
    wrapped = flashpoint_io_of(trainer)
    if not _has_callback(trainer, base, wrapped):
        return default_auto_resume
    if wrapped is None:
        engine, alternate = Checkpointer(base, config), trainer.strategy.checkpoint_io
        wrapped = MLFlashpointCheckpointIO(
            engine, alternate, trainer=trainer, async_save=async_save, always_save_context=always_save_context
        )
        _wrap(trainer, wrapped)
    return MLFlashpointAutoResume(wrapped.engine, default_auto_resume)


def _has_callback(trainer: Any, base: CheckpointContainerId, wrapped: MLFlashpointCheckpointIO | None) -> bool:
    """Return False if the trainer's callback is not enabled. Raise if it, or a wrapper, has another base container."""
    callbacks = [each for each in trainer.callbacks if isinstance(each, MLFlashpointCheckpointCallback)]
    if any(not each.enabled for each in callbacks):
        return False
    if not callbacks:
        _log.warning("the trainer has no MLFlashpointCheckpointCallback: nothing will be saved into memory")
    used = {each.base: "of the callback" for each in callbacks}
    if wrapped is not None:
        used[wrapped.engine.base] = "with which this trainer was wrapped before"
    for other in used.keys() - {base}:
        text = f"is not that {used[other]}, {other}"
        raise InvalidArgumentError(text, argument="flashpoint_base_container", value=str(base))
    return True


def _check_supported(trainer: Any, default_auto_resume: AutoResume | None) -> None:
    if default_auto_resume is not None and not isinstance(default_auto_resume, AutoResume):
        text = "must be nemo.lightning's AutoResume, or None"
        raise InvalidArgumentError(text, argument="default_auto_resume", value=default_auto_resume)
    strategy, why, hint = getattr(trainer, "strategy", None), "", ""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not isinstance(strategy, MegatronStrategy):
        why = "must have NeMo's MegatronStrategy, whose sharded state dicts are what is saved"
        hint = "for Lightning's own strategies there is ml_flashpoint.adapter.lightning"
    elif getattr(strategy, "_fsdp", None) is not None:
        why = "has FSDP, whose optimizer state NeMo saves in a form of its own"
        hint = "use MegatronStrategy without fsdp="
    elif several and not (dist.is_available() and dist.is_initialized()):
        why = "has not set up torch.distributed, which replication needs"
        hint = "call trainer.strategy.setup_environment() first"
    if why:
        raise InvalidArgumentError(why, argument="trainer.strategy", value=type(strategy), hint=hint)


def _wrap(trainer: Any, ours: MLFlashpointCheckpointIO) -> None:
    if not ours.async_save and not isinstance(ours.alternate, AsyncFinalizableCheckpointIO):
        trainer.strategy.checkpoint_io = ours
        return
    trainer.strategy.checkpoint_io = MLFlashpointAsyncFinalizableCheckpointIO(ours)
    # The strategy adds one if its own saves are asynchronous.
    if not any(isinstance(each, AsyncFinalizerCallback) for each in trainer.callbacks):
        trainer.callbacks.append(AsyncFinalizerCallback())


class MLFlashpointAutoResume(AutoResume):  # type: ignore[misc]
    """Chooses the newest version in memory; if there is none, it is the user's own `AutoResume`, or none."""

    def __init__(self, engine: Checkpointer, default: AutoResume | None = None) -> None:
        while isinstance(default, MLFlashpointAutoResume):
            default = default.default
        # What the user's says of itself is arguments here too: NeMo looks at some of it.
        fields = () if default is None else dataclasses.fields(AutoResume)
        super().__init__(**{each.name: getattr(default, each.name) for each in fields})
        self.engine = engine
        self.default: AutoResume | None = default

    def setup(self, trainer: Any, model: Any = None) -> None:
        """Tell the trainer where to go on from. Collective."""
        path = self._newest(model)
        if path is None:
            _log.info("memory has no version to go on from")
            if self.default is not None:
                self.default.setup(trainer, model)
            return
        _log.info("going on from %s", path)
        # Not `last_model_path` of the checkpoint callback, which deletes what that says.
        trainer.ckpt_path = path
        context = self._context_of(path)
        if getattr(self.restore_config, "load_artifacts", False) and context is not None:
            _try_restore_tokenizer(model, context)

    def _newest(self, model: Any) -> Path | None:
        """Return the newest version in memory; None where the user's own `AutoResume` is to be asked. Collective."""
        try:
            found = self.engine.latest()
        except NothingLoadableError as error:
            if self.default is None or self.default.get_trainer_ckpt_path(model) is None:
                raise  # training would start from nothing, and overwrite
            _log.error("going on from elsewhere, and what is in memory will be overwritten: %s", error)
            self.engine.go_on_from(None)
            return None
        return None if found is None else Path(str(found))

    def get_trainer_ckpt_path(self, model: Any = None) -> Path | None:
        """Return the newest version in memory, or what the user's own finds. Collective."""
        path = self._newest(model)
        if path is None and self.default is not None:
            path = self.default.get_trainer_ckpt_path(model)
        return path

    def get_context_path(self, model: Any = None) -> Path | None:
        """Return the context folder that was saved with the version, or what the user's own finds. Collective."""
        path = self._newest(model)
        context = None if path is None else self._context_of(path)
        if context is None and self.default is not None:
            context = self.default.get_context_path(model)
        return context

    def _context_of(self, version: Path) -> Path | None:
        """Return the context of a version, unpacked beside it, on each node; None if it was saved without."""
        archive, folder = version / CONTEXT_FILE, version.parent / _CONTEXT_FOLDER
        ranks = rank_group()
        ok = True
        if ranks.is_node_leader and archive.is_file():
            try:
                if folder.is_symlink():  # what it leads to is left alone
                    folder.unlink()
                shutil.rmtree(folder, ignore_errors=True)
                make_private(folder)
                with zipfile.ZipFile(archive) as packed:
                    packed.extractall(folder)
            except (OSError, FlashpointError, zipfile.BadZipFile) as error:
                _log.error("the context of %s cannot be unpacked: %s", version.name, error)
                ok = False
        ok = ranks.all_ok(ok)
        return folder if ok and archive.is_file() else None
