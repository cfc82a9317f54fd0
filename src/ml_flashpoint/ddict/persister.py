"""What a dictionary asks of durable storage: the interface of persisters.

Owns the interface, which users may implement for a storage of their own. The persisters for directories, URLs and
DAOS are in `persistence`, from where everything here is importable too. *When* to persist, and what is in a
checkpoint, is up to the dictionary's coordinator and managers.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.manifest import MAX_WORLD_SIZE

if TYPE_CHECKING:
    from typing_extensions import Buffer

_RUN_ID: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")
_MAX_RECEIPT: Final = 1000

MAX_CHECKPOINT_ID: Final = 2**62 - 1
"""There is always a next one that is a step of the engine, too."""


def new_run_id() -> str:
    """Returns the id of a new run: unique, and later ones mostly compare greater."""
    return f"{time.time_ns():016x}-{os.urandom(4).hex()}"


def check_run_id(run_id: object) -> str:
    """Returns a run id that can be used in a name.

    Raises:
        InvalidArgumentError: It is not 1 to 100 letters, digits, `_` and `-`, the first a letter or digit.
    """
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise InvalidArgumentError(
            "a run id must be 1 to 100 letters, digits, '_' or '-', the first a letter or digit",
            argument="run_id",
            value=run_id,
        )
    return run_id


@dataclass(frozen=True, slots=True)
class PersistedCheckpoint:
    """A complete checkpoint on durable storage. All that a reader, in whichever process, has to know of it.

    Attributes:
        checkpoint_id: its id.
        run: id of the run that wrote it.
        managers: number of managers of that run, and so of parts; not necessarily that of the reader's dictionary.
        parts: for each part, what `CheckpointPersister.write_part` returned.

    Raises:
        InvalidArgumentError: a field has the wrong type or is out of range.
    """

    checkpoint_id: int
    run: str
    managers: int
    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        check_checkpoint_id(self.checkpoint_id)
        check_run_id(self.run)
        checked_integer("managers", self.managers, 1, MAX_WORLD_SIZE)
        if (
            not isinstance(self.parts, tuple)
            or len(self.parts) != self.managers
            or not all(isinstance(part, str) and len(part) <= _MAX_RECEIPT for part in self.parts)
        ):
            raise InvalidArgumentError(
                f"parts must be one text of at most {_MAX_RECEIPT} characters for each manager",
                argument="parts",
                value=self.parts,
            )

    def to_fields(self) -> dict[str, Any]:
        """Returns it as plain JSON."""
        return {**dataclasses.asdict(self), "parts": list(self.parts)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PersistedCheckpoint:
        """Returns what `to_fields` was called on. Trusts nothing.

        Raises:
            InvalidArgumentError: These are not such fields.
        """
        try:
            parts = fields["parts"]
            return cls(**{**fields, "parts": tuple(parts) if isinstance(parts, list) else parts})
        except (KeyError, TypeError) as error:
            raise InvalidArgumentError("no persisted checkpoint", argument="fields", value=fields) from error


def check_checkpoint_id(checkpoint_id: Any, argument: str = "checkpoint_id") -> int:
    """Returns a checkpoint id.

    Raises:
        InvalidArgumentError: It is not an integer from 0 to `MAX_CHECKPOINT_ID`.
    """
    return checked_integer(argument, checkpoint_id, 0, MAX_CHECKPOINT_ID)


class CheckpointPersister(ABC):
    """Writes checkpoints of one dictionary to durable storage, and reads them back.

    To use a storage of your own, derive a class from this one and give it to ``DDict(persister_class=...)``. The
    dictionary makes one instance in each manager's process, as ``cls(persist_path, name=..., managers=...)``, and one
    in the coordinator's, which is that of its creator. On that one, it calls `begin_run`, `complete`, `remove` and
    `keep`, on the others `join_run`, `write_part` and the readers. Constructing one must be cheap and touch no storage.

    A *part* is what one manager has of one checkpoint: an index, which is opaque text, and named byte items. A
    checkpoint exists from the moment `complete` has returned, and not before, whenever a process is killed. A *run*
    is one life of a dictionary: what another run has written must never be taken for this one's.

    All calls block; they come from background threads, and `write_part` and the readers from several at a time. Errors
    should be `FlashpointError`s, `DamagedError` among them for bytes that are not what was written.

    Args:
        persist_path: what the user gave to the dictionary. What it means is the class's choice.
        name: name of the dictionary.
        managers: number of its managers.

    Raises:
        InvalidArgumentError: an argument cannot be used.
    """

    def __init__(self, persist_path: str = "", *, name: str = "", managers: int = 1) -> None:
        for argument, value in (("persist_path", persist_path), ("name", name)):
            if not isinstance(value, str):
                raise InvalidArgumentError(f"{argument} must be text", argument=argument, value=value)
        self.persist_path = persist_path
        self.name = name
        self.managers = checked_integer("managers", managers, 1, MAX_WORLD_SIZE)

    @classmethod
    def resolve_path(cls, persist_path: str) -> str:
        """Returns the path that all managers are given; called once, in the process that makes the dictionary.

        A relative path of a directory, for one, has to be made absolute there.
        """
        return persist_path

    @abstractmethod
    def begin_run(self, run_id: str, *, continues: tuple[str, int] | None = None) -> None:
        """Makes this the coordinator's persister, for a run; called again with a new run id after each restore, and
        after each rollback that takes back what may be persisted.

        Args:
            run_id: see `new_run_id`.
            continues: a run, and the newest checkpoint of its history that belongs to the history of this run, too:
                what is above is not found again. None: this run starts empty.

        Raises:
            JobInUseError: a live dictionary has this name and path.
        """

    @abstractmethod
    def join_run(self, run_id: str) -> None:
        """Sets the run that `write_part` writes for, in a process that is not the coordinator's."""

    @abstractmethod
    def write_part(self, checkpoint_id: int, manager: int, index: Buffer, items: Sequence[tuple[str, Buffer]]) -> str:
        """Writes a part. It is durable on return, but does not count until `complete`.

        May be called again for the same checkpoint and manager, after a failure or because the checkpoint was
        written anew after a rollback: what was complete before stays readable until `complete`.

        Args:
            checkpoint_id: of the checkpoint.
            manager: number of the manager whose part it is.
            index: anything; comes back from `read_index`.
            items: distinct names, and contiguous buffers that do not change meanwhile; written without being copied.

        Returns:
            A receipt of at most 1000 characters, which the coordinator passes on to `complete`.
        """

    @abstractmethod
    def complete(self, checkpoint_id: int, receipts: Sequence[str]) -> PersistedCheckpoint:
        """Makes a checkpoint exist, after all managers have written their parts.

        Args:
            checkpoint_id: of the checkpoint. If it was complete before, it is replaced at once.
            receipts: what `write_part` returned to each manager, by its number.

        Raises:
            FlashpointError: a part is not there, and nothing has changed; or the storage failed: then the checkpoint
                may exist all the same. Either way, it may be written and completed again.
        """

    @abstractmethod
    def ids(self) -> list[int]:
        """Returns the ids, ascending, of what can be restored: complete and valid, of the history of this run.

        Before anything was persisted by the run, and without `begin_run`: of the newest run with this name that
        has something complete.
        """

    @abstractmethod
    def locate(self, checkpoint_id: int) -> PersistedCheckpoint:
        """Returns where one of `ids` is.

        Raises:
            DDictPersistError: it is not one of them; the message names those there are.
        """

    @abstractmethod
    def read_index(self, checkpoint: PersistedCheckpoint, part: int) -> bytes:
        """Returns the index of a part (numbered by the manager that wrote it), verified.

        Raises:
            DamagedError: it is not what was written; names the file.
            ObjectNotFoundError: it is gone.
        """

    @abstractmethod
    def read_item(
        self, checkpoint: PersistedCheckpoint, part: int, name: str, into: Buffer | None = None
    ) -> bytes | memoryview:
        """Returns an item of a part, verified.

        Args:
            checkpoint: from `locate`.
            part: number of the manager that wrote it.
            name: of the item.
            into: writable and contiguous, at least as long as the item, which is read into its start; on an
                error, anything may be there. None: returns new bytes.

        Returns:
            The bytes, or the part of `into` that holds them.

        Raises:
            DamagedError: it is not what was written; names the file.
            ObjectNotFoundError: there is no such item, or its file is gone.
        """

    @abstractmethod
    def remove(self, checkpoint_id: int) -> None:
        """Removes a checkpoint of `ids`; one that is not there is no error."""

    def keep(self, count: int) -> None:
        """Removes all but the newest `count` of `ids`; called after `complete`, with no part being written.

        Args:
            count: -1: all stay. 0 would mean that nothing is persisted in the first place: nothing is removed.
        """
        if checked_integer("count", count, -1) > 0:
            for checkpoint_id in self.ids()[:-count]:
                self.remove(checkpoint_id)

    def close(self) -> None:
        """Lets go of whatever is held. May be called twice. What is persisted stays."""
        return None


class NullCheckpointPersister(CheckpointPersister):
    """Persists nothing: for dictionaries that live in memory only. Says so and is never made."""
