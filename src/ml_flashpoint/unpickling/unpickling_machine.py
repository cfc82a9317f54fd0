"""Runs what ``torch.save`` pickles, without any of the freedom that a pickle has.

Owns the opcodes of protocol 2, which is what ``torch.save`` writes; anything else is refused. The machine makes
nothing by itself but plain containers and values. Names, what may be called and with what effect, and whose state may
be set are a `Vocabulary`'s business.
"""

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pickle import decode_long
from typing import Any, Protocol

from ml_flashpoint.unpickling.safe_numpy import Shell


class Vocabulary(Protocol):
    """What a pickle can say to a machine."""

    def find(self, name: str) -> Any:
        """What a name stands for. Raises for names that stand for nothing here."""

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """What calling it makes. Raises for whatever may not be called."""

    def new(self, kind: Any, args: tuple[Any, ...]) -> Any:
        """A new instance. Raises for types that may not be made."""

    def set_state(self, instance: Any, state: Any) -> None:
        """Set the state of an instance. Raises for whatever may have none."""

    def persistent(self, identity: Any) -> Any:
        """What lies outside of the pickle under this identity."""

    def may_hold(self, holder: Any) -> bool:
        """Whether items may be put into something that is no plain container."""


_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_LISTS = (list, deque)


class Machine:
    """Runs one pickle.

    Args:
        data: the pickle.
        vocabulary: what it can say.

    Raises:
        Exception: of any type, for whatever is wrong with it. Nothing that it says can do worse.
    """

    def __init__(self, data: bytes, vocabulary: Vocabulary) -> None:
        self._data = data
        self._at = 0
        self._words = vocabulary
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._unfinished = 0

    def run(self) -> Any:
        """The value that the pickle stands for."""
        while True:
            code = self._read(1)
            if code == b".":
                break
            _OPCODES[code](self)
        if self._unfinished:
            raise ValueError("an array or a dtype is not complete")
        return self._pop()

    def _read(self, count: int) -> bytes:
        data = self._data[self._at : self._at + count]
        if len(data) != count:
            raise EOFError("the pickle ends early")
        self._at += count
        return data

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._read(struct.calcsize(form)))[0]

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    def _pop(self) -> Any:
        return self._stack.pop()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    # ---- opcodes ------------------------------------------------------------------------------------------

    def _protocol(self) -> None:
        if (version := self._read(1)[0]) != 2:
            raise ValueError(f"pickle protocol {version}, not 2")

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def _text(self) -> None:
        self._push(self._read(self._number("<I")).decode("utf-8", "surrogatepass"))

    def _integer(self, count: int) -> None:
        if count < 0:
            raise ValueError("an integer of a negative length")
        self._push(decode_long(self._read(count)))

    def _put(self, place: int) -> None:
        value = self._memo[place] = self._stack[-1]
        if isinstance(value, Shell):
            value.memo.append(place)

    def _global(self) -> None:
        # Protocol 2 has the names that Python 2 had.
        module, name = self._line(), self._line()
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self._push(self._words.find(f"{module}.{name}"))

    def _reduce(self) -> None:
        args = self._arguments()
        self._made(self._words.call(self._pop(), args))

    def _new(self) -> None:
        args = self._arguments()
        self._made(self._words.new(self._pop(), args))

    def _arguments(self) -> tuple[Any, ...]:
        args = self._pop()
        if type(args) is not tuple:
            raise TypeError("arguments that are no tuple")
        return args

    def _made(self, value: Any) -> None:
        self._unfinished += isinstance(value, Shell)
        self._push(value)

    def _build(self) -> None:
        state = self._pop()
        instance = self._stack[-1]
        if not isinstance(instance, Shell):
            self._words.set_state(instance, state)
            return
        self._unfinished -= 1
        value = self._stack[-1] = instance.finish(state)
        for place in instance.memo:
            if self._memo[place] is instance:
                self._memo[place] = value

    def _extend(self, items: list[Any]) -> None:
        holder = self._stack[-1]
        if type(holder) not in _LISTS and not self._words.may_hold(holder):
            raise TypeError(f"a {type(holder).__name__} takes no items")
        holder.extend(items)

    def _assign(self, items: list[Any]) -> None:
        holder = self._stack[-1]
        if type(holder) not in _MAPPINGS and not self._words.may_hold(holder):
            raise TypeError(f"a {type(holder).__name__} takes no keys")
        for key, value in zip(items[::2], items[1::2], strict=True):
            holder[key] = value


_OPCODES: dict[bytes, Callable[[Machine], None]] = {
    b"\x80": Machine._protocol,
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"J": lambda m: m._push(m._number("<i")),
    b"K": lambda m: m._push(m._number("<B")),
    b"M": lambda m: m._push(m._number("<H")),
    b"\x8a": lambda m: m._integer(m._number("<B")),
    b"\x8b": lambda m: m._integer(m._number("<i")),
    b"G": lambda m: m._push(m._number(">d")),
    b"X": Machine._text,
    b")": lambda m: m._push(()),
    b"]": lambda m: m._push([]),
    b"}": lambda m: m._push({}),
    b"(": Machine._mark,
    b"t": lambda m: m._push(tuple(m._marked())),
    b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2),
    b"\x87": lambda m: m._tuple(3),
    b"a": lambda m: m._extend([m._pop()]),
    b"e": lambda m: m._extend(m._marked()),
    b"s": lambda m: m._assign([m._pop(), m._pop()][::-1]),
    b"u": lambda m: m._assign(m._marked()),
    b"q": lambda m: m._put(m._number("<B")),
    b"r": lambda m: m._put(m._number("<I")),
    b"h": lambda m: m._push(m._memo[m._number("<B")]),
    b"j": lambda m: m._push(m._memo[m._number("<I")]),
    b"c": Machine._global,
    b"R": Machine._reduce,
    b"\x81": Machine._new,
    b"b": Machine._build,
    b"Q": lambda m: m._push(m._words.persistent(m._pop())),
}
