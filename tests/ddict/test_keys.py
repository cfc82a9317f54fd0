"""Keys as bytes: what is equal in a dict is equal in bytes, in every process, and comes back equal."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import os
import subprocess
import sys
from collections import Counter, namedtuple
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.ddict.wire.keys import MAX_KEY_BYTES, decode_key, encode_key, place
from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.complex_numbers(allow_nan=False)
    | st.dates()
)
_KEYS = st.recursive(_SCALARS, lambda keys: st.lists(keys, max_size=4).map(tuple) | st.frozensets(keys, max_size=4))


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    pass


class Shouted(str):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shouted) and str.__eq__(self, other)

    def __hash__(self) -> int:
        return hash(("shouted", str(self)))


Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Place:
    shelf: str
    other: str
    row: int = 0


@given(_KEYS)
def test_a_key_comes_back_equal(key: Hashable) -> None:
    assert decode_key(encode_key(key)) == key


@given(_KEYS, _KEYS)
def test_bytes_are_equal_exactly_if_the_keys_are(one: Hashable, other: Hashable) -> None:
    assert (encode_key(one) == encode_key(other)) == (len({one, other}) == 1)


@pytest.mark.parametrize(
    "equals",
    [
        (1, True, 1.0, np.int64(1), np.float32(1), np.bool_(True), Colour.RED, 1 + 0j, fractions.Fraction(1)),
        (1, decimal.Decimal("1.00")),
        (0, False, 0.0, -0.0),
        (0.5, np.float32(0.5), np.float64(0.5), fractions.Fraction(1, 2), decimal.Decimal("0.5"), 0.5 + 0j),
        (1e300, int(1e300)),
        (math.inf, np.float32(math.inf)),
        ("a", Name("a"), np.str_("a")),
        (b"a", np.bytes_(b"a")),
        ((1, 2), Point(1, 2), (1.0, True + 1)),
        (frozenset("abcdef"), frozenset("fedcba")),
    ],
)
def test_what_a_dict_takes_for_one_key_is_one(equals: tuple[Hashable, ...]) -> None:
    assert len(set(equals)) == 1
    assert len({encode_key(key) for key in equals}) == 1


@pytest.mark.parametrize(
    "others",
    [
        ("1", b"1", 1, ("1",), (1,), None, ((1,),), 1.5, frozenset([1])),
        ("shout", Shouted("shout")),
        (decimal.Decimal("0.1"), 0.1),
        (decimal.Decimal("1e999999"), decimal.Decimal("1e-999999"), math.inf, 0),
        (2**53 + 1, 2.0**53),
        ((), frozenset(), "", b""),
        (("ab", "c"), ("a", "bc")),
    ],
)
def test_different_keys_stay_different(others: tuple[Hashable, ...]) -> None:
    assert len({encode_key(key) for key in others}) == len(set(others)) == len(others)
    assert [decode_key(encode_key(key)) for key in others] == list(others)


def test_nan_is_one_key() -> None:
    assert len({encode_key(math.nan), encode_key(float("nan")), encode_key(-math.nan)}) == 1
    assert math.isnan(decode_key(encode_key(math.nan)))  # type: ignore[arg-type]


def test_an_equal_object_has_equal_bytes_whatever_parts_it_shares() -> None:
    word = "".join(["sh", "elf"])  # a string of its own, unlike the interned name of the field
    apart = Place("".join(["sh", "elf"]), "".join(["sh", "elf"]))
    for key in (Place(word, word), Place("shelf", "shelf"), apart):
        assert encode_key(key) == encode_key(apart)
        assert decode_key(encode_key(key)) == key
    assert decode_key(encode_key(datetime.date(2020, 1, 2))) == datetime.date(2020, 1, 2)


@pytest.mark.slow
def test_other_processes_write_the_same_bytes() -> None:
    keys = "('k', 7, 0.5, frozenset(['a', 'b', 'c', 'd', 'e']), (None, b'x'), datetime.date(2020, 1, 2))"
    program = (
        f"import datetime; from ml_flashpoint.ddict.wire.keys import *; print(*[encode_key(k).hex() for k in {keys}])"
    )
    written = set()
    for seed in "01":
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        written.add(done.stdout)
    assert len(written) == 1
    assert written.pop().split() == [encode_key(key).hex() for key in eval(keys)]


@pytest.mark.parametrize("key", [[], {}, ([],), (1, {2: 3}), set()])
def test_what_cannot_be_hashed_is_no_key(key: Hashable) -> None:
    with pytest.raises(TypeError):
        encode_key(key)


def test_keys_are_bounded() -> None:
    assert decode_key(encode_key("a" * (MAX_KEY_BYTES - 1))) == "a" * (MAX_KEY_BYTES - 1)
    with pytest.raises(InvalidArgumentError, match="key="):
        encode_key("a" * MAX_KEY_BYTES)
    deep: tuple[object, ...] = ()
    for _ in range(100):
        deep = (deep,)
    with pytest.raises(InvalidArgumentError, match="nested"):
        encode_key(deep)
    with pytest.raises(InvalidArgumentError, match="digits"):
        encode_key(1 << 100_000)


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("no")


def test_what_cannot_be_pickled_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be pickled"):
        encode_key(Unpicklable())


@given(st.binary(max_size=40).filter(lambda data: data[:1] not in (b"p", b"t", b"z")))
def test_damaged_keys_are_told(data: bytes) -> None:
    try:
        key = decode_key(data)
    except DamagedError:
        return
    assert isinstance(key, (str, bytes, int, float, type(None)))


@pytest.mark.parametrize("data", [b"", b"x", b"nn", b"f123", b"s\xff", b"iabc", b"t\0\0\0\x05s", b"t\0\0", b"t" * 9])
def test_what_is_no_key_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_key(data)


def test_keys_are_spread_evenly() -> None:
    counts = Counter(place(encode_key(f"key {i}"), 7) for i in range(7000))
    assert sorted(counts) == list(range(7))
    assert max(counts.values()) < 1200
    assert min(counts.values()) > 800
