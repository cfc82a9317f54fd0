"""Names of saves: the run that made a save, and its step."""

from __future__ import annotations

import re
from typing import NamedTuple

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.manifest import Manifest

MAX_RUN = 10**12 - 1
"""Highest number of a run. A name with a higher one is no name of a save: nobody can make the next run unreadable."""
RUN_PATTERN = "[0-9]{8,12}"
"""Regular expression of the number in names."""
_TEXT = re.compile(RUN_PATTERN)


class SaveId(NamedTuple):
    """Name of a save. Saves of a later run compare greater, and within a run those of a later step.

    Attributes:
        run: number of the run, from 1. Run 0 is older than every run.
        step: training step.
    """

    run: int
    step: int

    @property
    def version(self) -> str:
        """Directory name of the version, ``step-<step>_ckpt``."""
        return CheckpointContainerId.format_version_container(self.step)

    @property
    def text(self) -> str:
        """The run as manifests and file names spell it: at least 8 digits."""
        return f"{self.run:08d}"

    @staticmethod
    def parse(version: str, text: str) -> SaveId | None:
        """Return the save of a version's directory name and a save id, or None if there is no such save."""
        step = CheckpointContainerId.parse_version_container(version)
        if step is None or not _TEXT.fullmatch(text):
            return None
        save = SaveId(int(text), step)
        return save if save.text == text else None

    @staticmethod
    def of(manifest: Manifest) -> SaveId | None:
        """Return the save of a part, or None if its save id is not that of a run."""
        return SaveId.parse(manifest.version, manifest.save_id)
