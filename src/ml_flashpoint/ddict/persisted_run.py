"""The run that a dictionary's checkpoints are persisted under, as one process knows it.

Owns the process's persister and which run it writes for; a restore begins another one. What is in a checkpoint is
`persisted_parts`', when one is persisted the coordinator's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ml_flashpoint.ddict.checkpoint_persister import PersistedCheckpoint
from ml_flashpoint.ddict.configuration import Configuration


class PersistedRun:
    """See the module."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.persister = configuration.options.make_persister()
        self.run_id = configuration.run_id
        self.restored: PersistedCheckpoint | None = None
        self.persister.join_run(self.run_id)

    def begin(self, run_id: str | None = None, restored: PersistedCheckpoint | None = None) -> None:
        """As the coordinator: write for this run, or for the one that begins with a restored checkpoint.

        Raises:
            JobInUseError: another dictionary of this name and path does.
        """
        run_id = run_id or self.run_id
        if self.persister.persists and not self._configuration.options.read_only:
            self.persister.begin_run(run_id, restored=restored)
        self.run_id, self.restored = run_id, restored

    def use(self, run_id: str, restored: Mapping[str, Any] | None) -> None:
        """Take note of the run, and of the checkpoint that its content is from."""
        if run_id == self.run_id:
            return
        self.run_id = run_id
        self.restored = None if restored is None else PersistedCheckpoint.from_fields(restored)
        self.persister.join_run(run_id)

    def fields(self) -> dict[str, Any]:
        """What `use` is called with by other managers."""
        return {"run": self.run_id, "restored": None if self.restored is None else self.restored.to_fields()}

    def complete(self, checkpoint_id: int, receipts: Sequence[str]) -> None:
        """Make a checkpoint exist, and remove those that are not to be kept."""
        self.persister.complete(checkpoint_id, receipts)
        self.persister.keep(self._configuration.options.persist_count)

    def remove_above(self, checkpoint_id: int) -> None:
        """Remove what this run has persisted above a checkpoint, which was rolled back."""
        if self.persister.persists:
            for each in reversed(self.persister.ids()):
                # What earlier runs have is below, or all there is: it is not this run's to touch.
                if each <= checkpoint_id or self.persister.locate(each).run != self.run_id:
                    return
                self.persister.remove(each)
