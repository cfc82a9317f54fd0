"""The requests that clients, managers and the coordinator of a dictionary make: what each says, and how it travels.

A request is a frozen dataclass. It travels as its name in snake case with two fields of JSON: ``a``, the values of its
own fields in their order, and ``t``, the seconds that are left to whoever asks. A peer that knows the secret may still
be wrong: what is not of the type that a field is declared with is refused. Keys and values travel in blobs beside it.
Answers are fields and blobs.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from ml_flashpoint.ddict.wire.written import NOTHING, Written
from ml_flashpoint.format.errors import ProtocolError
from ml_flashpoint.net.messages import Fields

if TYPE_CHECKING:
    from typing_extensions import Buffer

Result: TypeAlias = "tuple[Fields, Sequence[Buffer]]"
"""Fields and blobs of an answer."""

_MOST_TEXT: Final = 1000
_LONGEST_S: Final = 1e6
_Item = TypeVar("_Item")


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
    written: Written = NOTHING
    back: Back = Back()


class SealedPart(NamedTuple):
    """The snapshot that a manager has of a committed cut."""

    name: str  # of its part
    cut: int
    checkpoint_id: int


class Request:
    """Base of all requests."""

    __slots__ = ()


# ---- to managers, about keys: the first blob is a key, unless it is said otherwise ----------------------------------


@dataclass(frozen=True, slots=True)
class Put(Request):
    """Write a key: an inline value (a blob), one that lies in a slot, or one to be put there (``value_id``, blobs).

    Only if the key's entry has the number ``expected``, if that is not -1; 0: if there is no such key. Else ``ok`` is
    false in the answer. ``b`` there, as in those of all changes: `bput` wrote the key, so the client is to make the
    change at all other managers. ``late``: the newest cut that it came late for, if any.
    """

    whose: Whose
    flags: int = 0
    value_id: str = ""
    expected: int = -1


@dataclass(frozen=True, slots=True)
class PutMany(Request):
    """Write keys with small values, which follow each other in the blobs; ``outcomes``: `b`, or the error of each."""

    whose: Whose
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Add(Request):
    """Add to a number, which is ``default`` where there is none; ``before``: what it was."""

    whose: Whose
    amount: float
    default: float
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Delete(Request):
    """Delete a key; see `Put`."""

    whose: Whose
    flags: int = 0
    expected: int = -1


@dataclass(frozen=True, slots=True)
class Clear(Request):
    """Delete all keys. No blobs."""

    whose: Whose


@dataclass(frozen=True, slots=True)
class Allocate(Request):
    """Keep room for a large value, for the client to fill: ``v``, its id; ``path`` and ``size`` of the slot."""

    whose: Whose
    nbytes: int


@dataclass(frozen=True, slots=True)
class Abandon(Request):
    """Give up what was allocated. No blobs."""

    value_id: str


@dataclass(frozen=True, slots=True)
class Get(Request):
    """Read a key: a blob, or where the value lies; with ``remote``, always blobs; ``s``: the number of its entry. With
    ``wait``, and a dictionary that waits for keys, wait for the key to be written at this checkpoint."""

    whose: Whose
    wait: bool = False
    remote: bool = False


@dataclass(frozen=True, slots=True)
class GetMany(Request):
    """Read keys, one a blob: ``outcomes``, of each an error or null, the fields and the number of blobs."""

    whose: Whose
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Contains(Request):
    """Say whether a key is ``found``."""

    whose: Whose


@dataclass(frozen=True, slots=True)
class WaitFor(Request):
    """Wait until a key has an entry with another number than ``seen``; ``ok``: it has."""

    whose: Whose
    seen: int


@dataclass(frozen=True, slots=True)
class Keys(Request):
    """Give all keys, joined in one blob, and their number ``n``; with ``count`` that only. With ``once``, what `bput`
    wrote only at one manager. No blobs."""

    whose: Whose
    once: bool
    count: bool = False


# ---- to managers, by the coordinator and each other -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Request):
    """Say who this is: its number, ``manager``, and where it takes copies, ``transfers``."""


@dataclass(frozen=True, slots=True)
class Stats(Request):
    """Say what `ManagerStats` is made of."""


@dataclass(frozen=True, slots=True)
class Freeze(Request):
    """Refuse writes, or take them again. ``number``: higher in later requests, which may overtake earlier ones."""

    frozen: bool
    number: int


@dataclass(frozen=True, slots=True)
class Begin(Request):
    """Begin an epoch: drop all above its base. What a manager that was lost has, all others go back to.

    Attributes:
        epoch: its number.
        base: the checkpoint that it begins at; -1: empty.
        cut: the newest that any manager was asked for. What is written at ``base`` from now on is late for it.
        keep: cuts that can be gone back to, that of ``base`` included unless it is -1.
        pinned: others that are yet to be persisted.
        sealed: the snapshots that this manager has of them: one that was lost recovers these.
        restored: the version to read the one cut from, if it is not here.
        freeze: see `Freeze`.
    """

    epoch: int
    base: int
    cut: int
    keep: tuple[int, ...]
    pinned: tuple[int, ...]
    sealed: tuple[SealedPart, ...]
    restored: Fields | None
    frozen: bool
    number: int


@dataclass(frozen=True, slots=True)
class Discard(Request):
    """Discard what a handle wrote above a checkpoint.

    Attributes:
        whose: the handle, the checkpoint that it goes back to, the epoch that this was decided in, which the manager
            may be yet to begin, and the generation of the handle's request.
        number: higher in later requests, which may overtake earlier ones.
        dead: its process was killed, so that whatever comes of that handle yet is refused.
    """

    whose: Whose
    number: int
    dead: bool


@dataclass(frozen=True, slots=True)
class Prepare(Request):
    """Note what belongs to a cut, before anything of it can change. Those above the committed cut were called off."""

    epoch: int
    checkpoint_id: int
    cut: int
    committed: int


@dataclass(frozen=True, slots=True)
class Seal(Request):
    """Have verified copies of a prepared cut; ``name``: of the snapshot's part."""

    epoch: int
    cut: int


@dataclass(frozen=True, slots=True)
class Settle(Request):
    """Let go of what no one needs any more. ``cut``: of the checkpoint that is committed."""

    epoch: int
    oldest: int
    keep: tuple[int, ...]
    pinned: tuple[int, ...]
    committed: int
    cut: int


@dataclass(frozen=True, slots=True)
class AwaitKeys(Request):
    """Wait until all keys of a checkpoint are written again at a later one."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class Persist(Request):
    """Write this manager's part of a committed cut, as a version of the durable store."""

    cut: int
    version: Fields


@dataclass(frozen=True, slots=True)
class PrepareRestore(Request):
    """Read what is to be had of a version of the durable store, for a `Begin` to come."""

    version: Fields


@dataclass(frozen=True, slots=True)
class AbortRestore(Request):
    """Let go of what was read."""


@dataclass(frozen=True, slots=True)
class Replicate(Request):
    """Push what holders lack, without waiting: one came back, perhaps without its copies."""


@dataclass(frozen=True, slots=True)
class DropCopies(Request):
    """Drop what is held of another manager, but for the parts that it keeps. Those with the number ``before`` or a
    higher one stay: they were sealed after this was written."""

    of: int
    keep: tuple[str, ...]
    before: int


# ---- to the coordinator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State(Request):
    """Say what is committed, and the like; see `Coordinator.whole_state`."""


@dataclass(frozen=True, slots=True)
class Attach(Request):
    """Keep the handles attached that join with this session, for as long as the connection lives."""

    session: str


@dataclass(frozen=True, slots=True)
class Watch(Request):
    """Say which ``epoch`` it is, when another one begins or so many seconds are over."""

    epoch: int
    seconds: int


@dataclass(frozen=True, slots=True)
class Join(Request):
    """Count a handle as writing."""

    account: Account


@dataclass(frozen=True, slots=True)
class Move(Request):
    """Let a handle move to another checkpoint; with ``onwards``, or to the next one that nobody has skipped."""

    account: Account
    to: int
    onwards: bool


@dataclass(frozen=True, slots=True)
class GoBack(Request):
    """Take a handle back to a checkpoint, and discard what it wrote above. ``session``: that keeps it attached; "": it
    does not count as writing."""

    whose: Whose
    session: str
    back: Back


@dataclass(frozen=True, slots=True)
class CatchUp(Request):
    """Say what the epochs since that of a handle mean for it."""

    account: Account


@dataclass(frozen=True, slots=True)
class Leave(Request):
    """Count a handle no more."""

    account: Account


@dataclass(frozen=True, slots=True)
class Newest(Request):
    """Say what is committed, once all that can be now is."""

    epoch: int


@dataclass(frozen=True, slots=True)
class AwaitCommit(Request):
    """Wait until a checkpoint is committed. ``if_written``: do not wait where nobody writes."""

    account: Account
    checkpoint_id: int
    if_written: bool


@dataclass(frozen=True, slots=True)
class SetFrozen(Request):
    """Have all managers refuse writes, or take them again."""

    whose: Whose
    frozen: bool


@dataclass(frozen=True, slots=True)
class PersistNewest(Request):
    """Persist the newest committed checkpoint; ``checkpoint_id``: which that is."""


@dataclass(frozen=True, slots=True)
class PersistedIds(Request):
    """Give the ``ids`` of what is persisted."""


@dataclass(frozen=True, slots=True)
class Restore(Request):
    """Have all managers hold a persisted checkpoint, and nothing else."""

    whose: Whose
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class Here(Request):
    """Say where a manager is, which has begun: its node, its Unix socket, and host and port for other nodes."""

    manager: int
    node: str
    unix: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Places(Request):
    """Give the ``places`` of all managers, as they said with `Here`."""


@dataclass(frozen=True, slots=True)
class Returned(Request):
    """Have an epoch begin: this manager was lost, is back, and has found what it can go on from."""

    manager: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class SealedBy(Request):
    """Give the ``sealed`` snapshots that a manager has of what is committed."""

    manager: int


# ---- how they travel ------------------------------------------------------------------------------------------------


def _of_type(kind: type[_Item]) -> Callable[[Any], _Item]:
    def check(value: Any) -> _Item:
        if type(value) is not kind:
            raise ValueError(f"{value!a} is no {kind.__name__}")
        return value

    return check


def _integer(value: Any) -> int:
    if type(value) is not int or not -1 <= value < 1 << 63:
        raise ValueError(f"{value!a} is no integer from -1")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!a} is no number")
    number: float = value
    return number


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MOST_TEXT:
        raise ValueError("not a short text")
    return value


def _whose(value: Any) -> Whose:
    handle, checkpoint_id, epoch, generation = value
    return Whose(_text(handle), _integer(checkpoint_id), _integer(epoch), _integer(generation))


def _back(value: Any) -> Back:
    to, onwards = value
    return Back(_integer(to), _flag(onwards))


def _account(value: Any) -> Account:
    whose, session, (checkpoint, late), back = value
    return Account(_whose(whose), _text(session), Written(_integer(checkpoint), _integer(late)), _back(back))


def _sealed_part(value: Any) -> SealedPart:
    name, cut, checkpoint_id = value
    return SealedPart(_text(name), _integer(cut), _integer(checkpoint_id))


_fields, _flag, _list = _of_type(dict), _of_type(bool), _of_type(list)
_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "int": _integer,
    "float": _number,
    "str": _text,
    "bool": _flag,
    "tuple[int, ...]": lambda value: tuple(map(_integer, _list(value))),
    "tuple[str, ...]": lambda value: tuple(map(_text, _list(value))),
    "tuple[SealedPart, ...]": lambda value: tuple(map(_sealed_part, _list(value))),
    "Whose": _whose,
    "Back": _back,
    "Account": _account,
    "Fields": _fields,
    "Fields | None": lambda value: None if value is None else _fields(value),
}
"""How a value is read, by the type that its field is declared with."""


class _Kind(NamedTuple):
    """A kind of requests."""

    name: str
    make: type[Request]
    values: Callable[[Any], Sequence[Any]]  # of the fields of one
    readers: list[Callable[[Any], Any]]


def _kind_of(kind: Any) -> _Kind:
    fields = dataclasses.fields(kind)
    names = [each.name for each in fields]
    getter: Callable[[Any], Any] = attrgetter(*names) if names else tuple
    values = getter if len(names) > 1 else (lambda request: [getter(request)] if names else [])
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    return _Kind(name, kind, values, [_READERS[str(each.type)] for each in fields])


_KINDS: Final[dict[Any, _Kind]] = {
    kind: _kind_of(kind) for kind in list(globals().values()) if dataclasses.is_dataclass(kind)
}
_BY_NAME: Final = {kind.name: kind for kind in _KINDS.values()}


def name_of(request: Request) -> str:
    """Return the name that a request travels by."""
    return _KINDS[type(request)].name


def encode(request: Request, left_s: float) -> tuple[str, Fields]:
    """Return the name of an operation, and its fields. ``left_s``: seconds that are left to whoever asks."""
    kind = _KINDS[type(request)]
    return kind.name, {"a": kind.values(request), "t": left_s}


def decode(operation: str, fields: Fields) -> tuple[Request, float]:
    """Return the request that this is, and when its time is up, by ``time.monotonic()``. Raises `ProtocolError`: it is
    none."""
    kind = _BY_NAME.get(operation)
    if kind is None:
        raise ProtocolError(f"there is no operation {operation!a}")
    try:
        left_s, values = _number(fields["t"]), fields["a"]
        if not 0 <= left_s <= _LONGEST_S or len(values) != len(kind.readers):
            raise ValueError("too few or too many, or not the seconds that are left")
        made = kind.make(*[read(value) for read, value in zip(kind.readers, values, strict=True)])
        return made, time.monotonic() + left_s
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not the fields of {operation!a}: {error}") from error
