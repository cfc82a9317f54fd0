"""Forged archives, which are loaded one after the other; and what comes of them is used."""

from __future__ import annotations

import collections
import contextlib
import copy
import datetime
import decimal
import fractions
import io
import pathlib
import pickletools
import struct
import uuid
import warnings
import zipfile
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ml_flashpoint.format.errors import DamagedError, UnsafeContentError
from ml_flashpoint.state.archive import load_archive, save_archive

VALUES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, "x", (b"y", -(1 << 70))], "e": ()},
    "containers": [
        collections.OrderedDict(a=1),
        collections.defaultdict(set, {1: 2}),
        collections.deque([1, 2], 3),
        collections.Counter("aab"),
        {1, 2},
        frozenset((3,)),
        slice(1, 2),
        range(3),
        bytearray(b"abc"),
        complex(1, 2),
    ],
    "scalars": [
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone(datetime.timedelta(hours=1), "x")),
        datetime.date(2026, 1, 2),
        decimal.Decimal("1.5"),
        fractions.Fraction(1, 3),
        pathlib.Path("a/b"),
        uuid.UUID(int=5),
        io.BytesIO(b"abc"),
        torch.device("cpu"),
        torch.Size([2]),
        torch.float16,
        torch.strided,
    ],
    "arrays": [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.zeros(0),
        np.array(3),
        np.array([1, "a", None, [2]], dtype=object),
        np.array([(1, 2.5)], dtype=[("a [m/s]", "<i4"), ("b", "<f8", (2,))]),
        np.zeros(2, "V0"),
        np.array(["2026-01-01"], "M8[D]"),
    ],
    "numpy scalars": [
        np.float32(1),
        np.bool_(True),
        np.str_("abc"),
        np.str_(""),
        np.bytes_(b""),
        np.datetime64("2026-01-01", "ns"),
        np.timedelta64(5, "25s"),
        np.dtype("f8"),
        np.dtype([("a", "<i4")], align=True),
        np.random.RandomState(0).get_state(legacy=False),
    ],
    "tensors": [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t()[1:],
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(1).expand(5),
        torch.zeros(0, 3),
        torch.zeros(0, 3)[:, 1],  # a view that begins behind its storage, in which it has nothing
        torch.zeros(3, 0)[2:],
        torch.ones(2, dtype=torch.uint16),
        torch.ones(2, dtype=torch.float8_e4m3fn),
        torch.empty(3, device="meta"),
        torch.ones(3, requires_grad=True),
    ],
    "other layouts": [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8),
        torch.quantize_per_tensor(torch.ones(0, 3), 0.5, 1, torch.quint8)[:, 1],
        torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8),
    ],
}


def archive_of(pickle: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """An archive as ``torch.save`` makes it, around any pickle."""
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as file:
        warnings.simplefilter("ignore")
        for name, data in {"data.pkl": pickle, "byteorder": b"little", **(records or {})}.items():
            file.writestr(f"archive/{name}", data)
    return stream.getvalue()


def saved(value: Any) -> bytes:
    """What is written here."""
    return save_archive(value, "value", allowed=None)


def pickled(value: Any) -> bytes:
    """What ``torch.save`` writes by itself."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def parts_of(archive: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Its pickle, and its storages."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        records = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    return records["data.pkl"], {name: data for name, data in records.items() if name.startswith("data/")}


def use(value: Any, depth: int = 0) -> None:
    """Read all memory that a value refers to."""
    if isinstance(value, torch.Tensor):
        if value.numel() < 1 << 16 and value.device.type == "cpu":
            copy.deepcopy(value.detach())
            dense = value.detach()
            if value.is_nested:
                dense = torch.cat([each.reshape(-1) for each in value.unbind()])
            elif value.layout is not torch.strided:
                if max(value.shape, default=0) < 1 << 8:
                    dense = value.detach().to_dense()
            elif value.is_quantized:
                dense = value.dequantize()
            str(dense)
    elif isinstance(value, (np.ndarray, np.generic)):
        np.array(value, copy=True).tobytes()
        str(value)
    elif isinstance(value, dict) and depth < 20:
        for key, each in list(value.items()):
            use((key, each), depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)) and depth < 20:
        for each in value:
            use(each, depth + 1)
    elif isinstance(value, datetime.datetime):
        value.ctime(), value.strftime("%c")
    else:
        repr(value)


def try_to_load(archive: bytes) -> None:
    """It loads, and what came of it can be used; or a typed error is raised."""
    try:
        value = load_archive(archive, "key", path="path")
    except (UnsafeContentError, DamagedError):
        return
    with contextlib.suppress(ValueError, TypeError, RuntimeError, OverflowError, AttributeError):
        use(value)  # some values are legal and of no use


def _name(name: str) -> bytes:
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


_SAID = [
    (code.name, argument)
    for value in VALUES.values()
    for archive in (saved(value), pickled(value))
    for code, argument, _ in pickletools.genops(parts_of(archive)[0])
]
_NAMES = sorted({str(said).replace(" ", ".") for name, said in _SAID if name == "GLOBAL"})
_OURS = [name for name in _NAMES if name.startswith("ml_flashpoint.")]
_TEXTS = sorted({str(said) for name, said in _SAID if name == "BINUNICODE" and len(str(said)) < 16})
_NAMES += ["torch.FloatTensor", "torch.sparse.FloatTensor", "torch.UntypedStorage", "torch.Generator"]
_NAMES += ["torch._utils._rebuild_device_tensor_from_numpy", "torch._utils._rebuild_wrapper_subclass"]
_NAMES += ["torch.float32", "torch.int64", "torch.FloatStorage", "torch.sparse_coo", "torch.per_channel_affine"]
_INTS = [0, 1, 2, 3, 8, 255, -1, -(1 << 31), (1 << 31) - 1, 1 << 40, 1 << 62, 1 << 63, 1 << 64, -(1 << 63)]
_ATOMS = [
    *(b"N\x88\x89)]}("[n : n + 1] for n in range(7)),
    *(b"\x8a" + bytes([9]) + n.to_bytes(9, "little", signed=True) for n in _INTS),
    *map(_text, ["", "O8", "f8", "V8", "i4", "storage", "0", "cpu", "<", "|", "latin1", "b", "a"]),
    *map(_text, _TEXTS),
    *map(_name, _NAMES),
]
_ACTS = [b"R", b"\x81", b"b", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u", b"Q", b"0", b"q\x00", b"h\x00"]
_PIECES = [*_ATOMS, *_ACTS, *_ACTS, *_ACTS]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A pickle of ``torch.save``, with bytes changed, put in, taken out or moved."""
    pickle, records = parts_of(saved(VALUES[draw(st.sampled_from(sorted(VALUES)))]))
    data = bytearray(pickle)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(2, len(data) - 1))
        act = draw(st.sampled_from(("set", "piece", "cut", "copy")))
        if act == "set":
            data[at] = draw(st.sampled_from((0, 1, 2, 8, 16, 63, 127, 255)))
        elif act == "piece":
            data[at:at] = draw(st.sampled_from(_PIECES))
        elif act == "cut":
            del data[at : min(at + draw(st.integers(1, 4)), len(data) - 1)]
        else:
            begin = draw(st.integers(2, len(data) - 1))
            data[at:at] = data[begin : begin + draw(st.integers(1, 40))]
    return archive_of(bytes(data), records)


@st.composite
def handmade(draw: st.DrawFn) -> bytes:
    """Opcodes in any order."""
    pieces = draw(st.lists(st.sampled_from(_PIECES), max_size=30))
    return archive_of(b"\x80\x02" + b"".join(pieces) + b".", {"data/0": bytes(range(64))})


@st.composite
def calls(draw: st.DrawFn) -> bytes:
    """A call of something known, with arguments that fit more or less, and a state set of what it made."""
    atom = st.sampled_from(_ATOMS)
    storage = b"(" + _text("storage") + _name("torch.FloatStorage") + _text("0") + _text("cpu")
    held = atom.map(lambda number: storage + number + b"tQ")
    flat = st.one_of(atom, held, st.lists(atom, max_size=3).map(lambda each: b"(" + b"".join(each) + b"t"))
    ours = st.sampled_from(_TEXTS).map(lambda kind: _text(kind))
    flat = st.one_of(flat, ours)
    made = st.tuples(st.sampled_from(_NAMES), st.lists(flat, max_size=4)).map(
        lambda each: _name(each[0]) + b"(" + b"".join(each[1]) + b"tR"
    )
    args = draw(st.lists(st.one_of(flat, made), max_size=8))
    if draw(st.booleans()):
        args.insert(0, draw(ours))
    call = (
        _name(draw(st.sampled_from([*_NAMES, *_OURS * 5])))
        + b"("
        + b"".join(args)
        + b"t"
        + draw(st.sampled_from((b"R", b"\x81")))
    )
    state = draw(
        st.one_of(st.just(b""), st.lists(st.one_of(flat, made), max_size=9).map(lambda s: b"(" + b"".join(s) + b"tb"))
    )
    return archive_of(b"\x80\x02" + call + state + b".", {"data/0": bytes(range(64))})


def fuzz(report: Any, examples: int, chosen: int) -> None:
    """Load that many archives of each kind."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for strategy in (mutated(), handmade(), calls()):
        relaxed = settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        seed(chosen)(relaxed(given(strategy)(try_to_load)))()
