"""`MLFlashpointAutoResume`: a NeMo trainer goes on from memory, or else from what the user's own `AutoResume` finds."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import zipfile
from pathlib import Path
from typing import Any

from nemo.lightning.resume import AutoResume, _try_restore_tokenizer

from ml_flashpoint.adapter.nemo.checkpoint_io import CONTEXT_FILE, EngineParts
from ml_flashpoint.format.errors import FlashpointError, NothingLoadableError
from ml_flashpoint.format.private_folders import make_private
from ml_flashpoint.ranks.rank_group import rank_group

_log = logging.getLogger(__name__)

_CONTEXT_FOLDER = "nemo-context"


class MLFlashpointAutoResume(AutoResume):  # type: ignore[misc]
    """Chooses the newest version in memory; if there is none, it is the user's own `AutoResume`, or none."""

    def __init__(self, parts: EngineParts, default: AutoResume | None = None) -> None:
        # What the user's says of itself is arguments here too: NeMo looks at some of it.
        fields = () if default is None else dataclasses.fields(AutoResume)
        super().__init__(**{each.name: getattr(default, each.name) for each in fields})
        self.parts = parts
        self.default = default

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
        """Return the newest version in memory; None if there is none, or none can be loaded and the user's own has
        something to go on from. Collective. Raises `NothingLoadableError` where training would start from nothing, and
        overwrite."""
        engine = self.parts.engine
        try:
            found = engine.latest()
        except NothingLoadableError as error:
            if self.default is None or self.default.get_trainer_ckpt_path(model) is None:
                raise
            _log.error("going on from elsewhere, and what is in memory will be overwritten: %s", error)
            engine.go_on_from(None)
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
