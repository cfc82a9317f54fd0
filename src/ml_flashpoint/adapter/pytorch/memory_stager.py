"""`MemoryStager`: DCP's staging future, for a loop that waits for it before it changes anything."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint import state_dict_saver

from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.adapter.pytorch.saves import StagedStateDict
from ml_flashpoint.format.errors import InvalidArgumentError

HAS_FUTURES = hasattr(state_dict_saver, "AsyncSaveResponse")
"""True if this torch takes futures of what is staged: since 2.9."""


class _StagingFuture(Future[dict[str, Any]]):
    """A staged state. The first to ask for it, such as DCP's thread, waits for the copy: no thread waits beside it."""

    def __init__(self, state: StagedStateDict) -> None:
        super().__init__()
        self._copying: StagedStateDict | None = state
        if state.staged.is_copied:
            self.result()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        state, self._copying = self._copying, None
        if state is not None:
            state.staged.await_copies()
            self.set_result(state)
        return super().result(timeout)


class MemoryStager:
    """DCP's ``AsyncStager``, for ``dcp.async_save(..., storage_writer=writer, async_stager=MemoryStager(writer))``.

    That returns an ``AsyncSaveResponse``, and copies from CUDA devices while the program goes on: no tensor there may
    change before ``staging_completion.result()``. One that does fails the save, as ``upload_completion`` tells, and
    from then on all is copied before ``async_save`` returns. If the writer watches an optimizer, only what that updates
    is copied late, and its ``step()`` waits by itself. Whatever is on the CPU is copied before ``async_save`` returns;
    before torch 2.9, so is all else.

    Raises:
        InvalidArgumentError: ``writer`` is no `MemoryStorageWriter`.
    """

    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def __init__(self, writer: MemoryStorageWriter) -> None:
        if not isinstance(writer, MemoryStorageWriter):
            raise InvalidArgumentError("must be a MemoryStorageWriter", argument="writer", value=writer)
        self._writer = writer

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        """Called by DCP, which takes either."""
        staged = self._writer.stage(state_dict, promised=HAS_FUTURES)
        return _StagingFuture(staged) if HAS_FUTURES else staged

    def synchronize_staging(self) -> None:
        """Have what this thread gives to the devices from now on wait for the copy."""
        self._writer.before_update()

    close = synchronize_staging  # the writer stays open
