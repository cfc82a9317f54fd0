"""The requests that clients, managers and the coordinator of a dictionary make: what each says, and how it travels.

A request travels as its name in snake case with two fields of JSON: ``a``, the values of its own fields in their order,
and ``t``, the seconds that are left to whoever asks. A peer that knows the secret may still be wrong: what is not of
the type that a field is declared with is refused. Keys and values travel in blobs beside it. Answers are fields and
blobs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from ml_flashpoint.format.errors import ProtocolError
from ml_flashpoint.net.messages import Fields

if TYPE_CHECKING:
    from typing_extensions import Buffer

Result: TypeAlias = "tuple[Fields, Sequence[Buffer]]"
"""Fields and blobs of an answer."""
Request: TypeAlias = tuple[Any, ...]
"""One of the named tuples below."""

_MOST_TEXT: Final = 1000
_LONGEST_S: Final = 1e6


class Written(NamedTuple):
    """The account of what a handle has written: the highest checkpoint that it has written at, and the highest cut that
    a write came late for; -1: none.

    A commit is a *cut*: the state of all managers at one checkpoint. Cuts are numbered in the order in which the
    coordinator asks for them. A write is part of the next cut at its checkpoint or above. It comes *late* for a cut
    that its manager has prepared at that checkpoint or above, and the manager answers with the number of that cut."""

    checkpoint: int = -1
    late: int = -1

    def and_also(self, other: Written) -> Written:
        """Return the account of both."""
        return Written(max(self.checkpoint, other.checkpoint), max(self.late, other.late))

    def back_to(self, checkpoint_id: int) -> Written:
        """Return what is left of it after a rollback to a checkpoint."""
        return Written(min(self.checkpoint, checkpoint_id), self.late)

    def is_above(self, checkpoint_id: int, cut: int) -> bool:
        """Return True if some of it is lost where this cut at a checkpoint is what is left."""
        return self.checkpoint > checkpoint_id or self.late >= cut


class Whose(NamedTuple):
    """The handle that makes a request, where it stands, its epoch, and the generation of the request (see `fence`)."""

    handle: str
    checkpoint_id: int
    epoch: int
    generation: int = 0


class Back(NamedTuple):
    """A rollback that may not have reached all managers; to -1: none."""

    to: int = -1
    onwards: bool = False  # not below what is committed by then: nothing that others have committed is taken back


class Account(NamedTuple):
    """The coordinator's news of a handle."""

    whose: Whose
    session: str  # that keeps it attached
    written: Written = Written()
    back: Back = Back()


class SealedPart(NamedTuple):
    """The snapshot that a manager has of a committed cut: the part ``run`` of ``step``."""

    run: int
    step: int
    cut: int
    checkpoint_id: int


# ---- to managers, about keys: the first blob is a key, unless it is said otherwise ----------------------------------


class Put(NamedTuple):
    """Write a key: an inline value (a blob), one that lies in a slot, or one to be put there (``value_id``, blobs).
    Answers to changes have ``ok``; ``b`` if `bput` wrote the key, so that the client is to make the change at all other
    managers; and ``late``, the newest cut that it came late for, if any."""

    whose: Whose
    flags: int = 0
    value_id: str = ""
    expected: int = -1  # number that the key's entry must have, else ``ok`` is false; 0: no entry, -1: any


class PutMany(NamedTuple):
    """Write keys with small values, which follow each other in the blobs; ``outcomes``: the error or answer of each."""

    whose: Whose
    flags: int = 0


class Add(NamedTuple):
    """Add to a number, which is ``default`` where there is none; ``before``: what it was."""

    whose: Whose
    amount: float
    default: float
    flags: int = 0


class Delete(NamedTuple):
    """Delete a key; see `Put`."""

    whose: Whose
    flags: int = 0
    expected: int = -1


class Clear(NamedTuple):
    """Delete all keys. No blobs."""

    whose: Whose


class Allocate(NamedTuple):
    """Keep room for a large value, for the client to fill: ``v``, its id; ``path`` of the slot."""

    whose: Whose
    nbytes: int


class Abandon(NamedTuple):
    """Give up what was allocated. No blobs."""

    value_id: str


class Get(NamedTuple):
    """Read a key: a blob, or where the value lies; with ``remote``, always blobs; ``s``: the number of its entry. With
    ``wait``, and a dictionary that waits for keys, wait for the key to be written at this checkpoint."""

    whose: Whose
    wait: bool = False
    remote: bool = False


class GetMany(NamedTuple):
    """Read keys, one a blob: ``outcomes``, of each an error or null, the fields and the number of blobs."""

    whose: Whose
    remote: bool = False


class Contains(NamedTuple):
    """Say whether a key is ``found``."""

    whose: Whose


class WaitFor(NamedTuple):
    """Wait until a key has an entry with another number than ``seen``; ``ok``: it has."""

    whose: Whose
    seen: int


class Keys(NamedTuple):
    """Give all keys, joined in one blob, and their number ``n``; with ``only_count`` that only. With ``once``, what
    `bput` wrote only at one manager. No blobs."""

    whose: Whose
    once: bool
    only_count: bool = False


# ---- to managers, by the coordinator and each other -----------------------------------------------------------------


class Hello(NamedTuple):
    """Say who this is: its number, ``manager``, and where it takes copies, ``transfers``."""


class Stats(NamedTuple):
    """Say what `ManagerStats` is made of."""


class Freeze(NamedTuple):
    """Refuse writes, or take them again. ``number``: higher in later requests, which may overtake earlier ones."""

    frozen: bool
    number: int


class Begin(NamedTuple):
    """Begin an epoch: drop all above its base. What a manager that was lost has, all others go back to."""

    epoch: int
    base: int  # the checkpoint that it begins at; -1: empty
    cut: int  # the newest that any manager was asked for: what is written at the base from now on is late for it
    keep: tuple[int, ...]  # cuts that can be gone back to, that of the base included unless that is -1
    pinned: tuple[int, ...]  # others that are yet to be persisted
    sealed: tuple[SealedPart, ...]  # the snapshots that this manager has of them: one that was lost recovers these
    restored: Fields | None  # the version to read the one cut from, if that is not here
    frozen: bool  # see `Freeze`
    number: int


class Discard(NamedTuple):
    """Discard what a handle wrote above a checkpoint. The manager may be yet to begin the epoch."""

    whose: Whose
    number: int  # higher in later requests, which may overtake earlier ones
    dead: bool  # its process was killed: whatever comes of that handle yet is refused


class Prepare(NamedTuple):
    """Note what belongs to a cut, before anything of it can change. Those above the committed cut were called off."""

    epoch: int
    checkpoint_id: int
    cut: int
    committed: int


class Seal(NamedTuple):
    """Have verified copies of a prepared cut; ``part``: run and step of the snapshot's part."""

    epoch: int
    cut: int


class Settle(NamedTuple):
    """Let go of what no one needs any more. ``cut``: of the checkpoint that is committed."""

    epoch: int
    oldest: int
    keep: tuple[int, ...]
    pinned: tuple[int, ...]
    committed: int
    cut: int


class AwaitKeys(NamedTuple):
    """Wait until all keys of a checkpoint are written again at a later one."""

    checkpoint_id: int


class Persist(NamedTuple):
    """Write this manager's part of a committed cut, as a version of the durable store."""

    cut: int
    version: Fields


class PrepareRestore(NamedTuple):
    """Read what is to be had of a version of the durable store, for a `Begin` to come; null: let go of that."""

    version: Fields | None


class Replicate(NamedTuple):
    """Push what holders lack, without waiting: one came back, perhaps without its copies."""


class DropCopies(NamedTuple):
    """Drop what is held of another manager, but for the parts that it keeps. Those with the number ``before`` or a
    higher one stay: they were sealed after this was written."""

    of: int
    keep: tuple[str, ...]
    before: int


# ---- to the coordinator ---------------------------------------------------------------------------------------------


class State(NamedTuple):
    """Say what is committed, and the like; see `Rules.state`."""


class Watch(NamedTuple):
    """Keep the handles attached that join with this session, for as long as the connection lives, and say which
    ``epoch`` it is, when another one begins or so many seconds are over."""

    session: str
    epoch: int
    seconds: int


class Join(NamedTuple):
    """Count a handle as writing."""

    account: Account


class Move(NamedTuple):
    """Let a handle move to another checkpoint; with ``onwards``, or to the next one that nobody has skipped."""

    account: Account
    to: int
    onwards: bool


class GoBack(NamedTuple):
    """Take a handle back to a checkpoint, and discard what it wrote above. ``session``: that keeps it attached; "": it
    does not count as writing."""

    whose: Whose
    session: str
    back: Back


class CatchUp(NamedTuple):
    """Say what the epochs since that of a handle mean for it."""

    account: Account


class Leave(NamedTuple):
    """Count a handle no more."""

    account: Account


class Newest(NamedTuple):
    """Say what is committed, once all that can be now is."""

    epoch: int


class AwaitCommit(NamedTuple):
    """Wait until a checkpoint is committed. ``if_written``: do not wait where nobody writes."""

    account: Account
    checkpoint_id: int
    if_written: bool


class SetFrozen(NamedTuple):
    """Have all managers refuse writes, or take them again."""

    whose: Whose
    frozen: bool


class PersistNewest(NamedTuple):
    """Persist the newest committed checkpoint; ``checkpoint_id``: which that is."""


class PersistedIds(NamedTuple):
    """Give the ``ids`` of what is persisted."""


class Restore(NamedTuple):
    """Have all managers hold a persisted checkpoint, and nothing else."""

    whose: Whose
    checkpoint_id: int


class Here(NamedTuple):
    """Say where a manager is, which has begun: its node, its Unix socket, and host and port for other nodes."""

    manager: int
    node: str
    unix: str
    host: str
    port: int


class Places(NamedTuple):
    """Give the ``places`` of all managers, as they said with `Here`."""


class Returned(NamedTuple):
    """Have an epoch begin: this manager was lost, is back, and has found what it can go on from."""

    manager: int
    incarnation: str


class SealedBy(NamedTuple):
    """Give the ``sealed`` snapshots that a manager has of what is committed."""

    manager: int


# ---- how they travel ------------------------------------------------------------------------------------------------


def _of(kind: type, is_right: Callable[[Any], bool] = lambda value: True) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind or not is_right(value):
            raise ValueError(f"not the {kind.__name__} that it should be")
        return value

    return read


def _or(other: type, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: value if type(value) is other else read(value)


_READERS: Final[dict[Any, Callable[[Any], Any]]] = {
    int: _of(int, lambda value: -1 <= value < 1 << 63),
    float: _or(int, _of(float)),
    str: _of(str, lambda value: len(value) <= _MOST_TEXT),
    bool: _of(bool),
    Fields: _of(dict),
    Fields | None: _or(type(None), _of(dict)),
}


def _reader_of(kind: Any) -> Callable[[Any], Any]:
    """Return what reads a value, by the type that it is declared with: one of these, a named tuple, or many of one."""
    if kind in _READERS:
        return _READERS[kind]
    as_list = _of(list)
    if get_origin(kind) is tuple:
        each = _reader_of(get_args(kind)[0])
        return lambda value: tuple(map(each, as_list(value)))
    readers = [_reader_of(each) for each in get_type_hints(kind).values()]
    return lambda value: kind(*[read(one) for read, one in zip(readers, as_list(value), strict=True)])


_NAMES: Final = {
    kind: re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    for name, kind in list(globals().items())
    if isinstance(kind, type) and hasattr(kind, "_fields")
}
_BY_NAME: Final = {name: _reader_of(kind) for kind, name in _NAMES.items()}


def name_of(request: Request) -> str:
    """Return the name that a request travels by."""
    return _NAMES[type(request)]


def encode(request: Request, left_s: float) -> tuple[str, Fields]:
    """Return the name of an operation, and its fields. ``left_s``: seconds that are left to whoever asks."""
    return name_of(request), {"a": request, "t": left_s}


def decode(operation: str, fields: Fields) -> tuple[Request, float]:
    """Return the request that this is, and when its time is up, by ``time.monotonic()``."""
    read = _BY_NAME.get(operation)
    if read is None:
        raise ProtocolError(f"there is no operation {operation!a}")
    try:
        left_s = _READERS[float](fields["t"])
        if not 0 <= left_s <= _LONGEST_S:
            raise ValueError("not the seconds that are left")
        request: Request = read(fields["a"])
        return request, time.monotonic() + left_s
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not the fields of {operation!a}: {error}") from error
