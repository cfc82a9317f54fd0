"""Archives of ``torch.save`` come back as they were saved, and forged ones never reach past their bytes."""

from __future__ import annotations

import gc
import io
import signal
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from ml_flashpoint.format.errors import DamagedError, UnsafeContentError
from ml_flashpoint.unpickling import safe_tensors
from ml_flashpoint.unpickling.checks import check_bytes
from ml_flashpoint.unpickling.safe_archive import load_archive, refused_names
from tests.workers.fuzz_archives import VALUES, archive_of, parts_of, saved


def _load(archive: bytes, **options: Any) -> Any:
    return load_archive(archive, "key", path="path", **options)


def _same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.layout, one.requires_grad) == (other.dtype, other.layout, other.requires_grad)
        assert one.is_nested or (one.shape == other.shape and one.is_conj() == other.is_conj())
        if one.device.type == "cpu":
            assert _bytes_of(one) == _bytes_of(other)
    elif isinstance(one, np.ndarray):
        # NumPy unpickles numbers in this machine's order of bytes, whatever they were saved in.
        assert (one.dtype.newbyteorder("="), one.shape) == (other.dtype.newbyteorder("="), other.shape)
        assert repr(one.tolist()) == repr(other.tolist())
        assert one.flags.f_contiguous == other.flags.f_contiguous
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            _same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            _same(mine, its)
    elif isinstance(one, io.BytesIO):
        assert (one.getvalue(), one.tell()) == (other.getvalue(), other.tell())
    else:
        assert one == other


def _bytes_of(tensor: torch.Tensor) -> list[Any]:
    held = tensor.detach()
    if held.is_nested:
        return [each.tolist() for each in held.unbind()]
    if held.layout is not torch.strided:
        held = held.to_dense()
    if held.is_quantized:
        held = held.dequantize()
    if held.is_complex():
        return held.tolist()  # type: ignore[no-any-return]
    return held.contiguous().view(torch.uint8).tolist() if held.numel() else []


@pytest.mark.parametrize("name", sorted(VALUES))
def test_what_torch_saves_comes_back_as_it_was(name: str) -> None:
    archive = saved(VALUES[name])
    assert refused_names(archive) == set()
    _same(_load(archive), VALUES[name])
    _same(torch.load(check_bytes(archive, "key", path="path"), weights_only=False), VALUES[name])


def test_what_shared_memory_shares_it_again() -> None:
    base = torch.arange(10.0)
    array = np.arange(3)
    one, other, first, second = _load(saved([base[2:5], base[4:7], array, array]))
    one[2] = 70
    assert other[0] == 70
    assert first is second


def test_attributes_and_types_that_are_allowed_come_back() -> None:
    tensor = torch.ones(2)
    tensor.note = "x"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "y"  # type: ignore[attr-defined]
    one, other = _load(saved([tensor, parameter]))
    assert (one.note, other.note, type(other)) == ("x", "y", torch.nn.Parameter)


# ---- forged -------------------------------------------------------------------------------------------------------


def _forged(value: Any, *changes: tuple[bytes, bytes], cut: int | None = None) -> bytes:
    pickle, records = parts_of(saved(value))
    for before, after in changes:
        assert before in pickle
        pickle = pickle.replace(before, after)
    return archive_of(pickle, {name: data[:cut] for name, data in records.items()})


_FOUR = torch.arange(4, dtype=torch.float32)
_COO = torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.ones(2), (4,), check_invariants=False)
_UNSORTED = torch.sparse_coo_tensor(
    torch.tensor([[1, 1]]), torch.ones(2), (4,), is_coalesced=True, check_invariants=False
)
_CSR = torch.sparse_csr_tensor(
    torch.tensor([0, 1, 2]), torch.tensor([0, 7]), torch.ones(2), (2, 2), check_invariants=False
)
_QUANTIZED = torch.quantize_per_channel(torch.ones(7, 3), torch.ones(7), torch.zeros(7), 0, torch.qint8)
_NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])

FORGED = {
    "an array of bytes that are pointers": _forged(np.arange(2), (b"i8q", b"O8q")),
    "a dtype that grows": _forged(np.zeros(2, "V1"), (b"K\x01K\x01K\x00t", b"K\x7fK\x01K\x00t")),
    "fewer bytes than an array has": _forged(np.zeros(2), (b"K\x02\x85", b"K\x7f\x85")),
    "a scalar of a pointer": _forged(np.int64(5), (b"i8q", b"O8q")),
    "a storage that is larger than its bytes": _forged(_FOUR, (b"K\x04", b"M\xff\xff")),
    "a storage that lost bytes": _forged(_FOUR, cut=8),
    "a size beyond the storage": _forged(_FOUR, (b"K\x00K\x04\x85", b"K\x00K\x05\x85")),
    "an offset beyond the storage": _forged(_FOUR, (b"K\x00K\x04\x85", b"K\x01K\x04\x85")),
    "a negative offset": _forged(_FOUR, (b"K\x00K\x04\x85", b"J\xff\xff\xff\xffK\x04\x85")),
    "a stride beyond the storage": _forged(_FOUR, (b"K\x01\x85", b"K\x02\x85")),
    "a wider dtype than the storage's": _forged(
        torch.ones(4, dtype=torch.uint16), (b"ctorch\nuint16", b"ctorch\nuint64")
    ),
    "sparse indices beyond the size": saved(_COO),
    "sparse indices that are not coalesced": saved(_UNSORTED),
    "compressed indices beyond the size": saved(_CSR),
    "fewer scales than channels": _forged(_QUANTIZED, (b"K\x07K\x03\x86", b"K\x03K\x07\x86")),
    "a nested size beyond the buffer": archive_of(
        parts_of(saved(_NESTED))[0],
        {
            name: (b"\xff\x00" + data[2:] if data[:8] == (2).to_bytes(8, "little") else data)
            for name, data in parts_of(saved(_NESTED))[1].items()
        },
    ),
}


@pytest.mark.parametrize("name", sorted(FORGED))
def test_what_is_forged_is_damaged(name: str) -> None:
    with pytest.raises(DamagedError, match="key"):
        _load(FORGED[name])


def test_flags_of_a_dtype_are_not_believed() -> None:
    forged = _forged(np.zeros(2, "V8"), (b"K\x08K\x01K\x00t", b"K\x08K\x01K\x3ft"))
    assert _load(forged).dtype == np.dtype("V8")


@pytest.mark.parametrize(
    "pickle",
    [
        b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00f8\x89\x88\x87R.",  # a dtype without its second half
        b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00f8\x89\x88\x87R(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb(K\x03X\x01\x00\x00\x00<NNNK\x7fK\x01K\x00tb.",  # and one with two of them
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"\x80\x02ctorch\nTensor\n)\x81.",
        b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    ],
)
def test_what_pickle_would_allow_is_refused(pickle: bytes) -> None:
    with pytest.raises(DamagedError):
        _load(archive_of(pickle))


def test_a_type_that_was_set_free_elsewhere_is_no_way_around() -> None:
    """Not even for NumPy's own functions: they are never called."""
    forged = FORGED["an array of bytes that are pointers"]
    with torch.serialization.safe_globals([(np.ndarray, "numpy.ndarray"), np.dtype]):
        assert refused_names(saved(np.zeros(2)), allowed=[np.dtype, np.ndarray]) == set()
        with pytest.raises(DamagedError):
            _load(forged, allowed=[np.dtype, np.ndarray])


def _fuzz(examples: int, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.fuzz_archives", str(examples), str(seed)],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    ended = signal.Signals(-done.returncode).name if done.returncode < 0 else done.returncode
    assert done.returncode == 0, f"it ended by {ended}\n{done.stderr[-6000:]}"


@pytest.mark.slow
def test_forged_archives_are_refused_or_good() -> None:
    _fuzz(150, 1)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(4))
def test_many_forged_archives_are_refused_or_good(seed: int) -> None:
    _fuzz(20_000, seed)


def test_a_name_that_is_not_allowed_is_named() -> None:
    with pytest.raises(UnsafeContentError, match=r"posix\.mkdir"):
        _load(archive_of(b"\x80\x02cposix\nmkdir\nX\x01\x00\x00\x00x\x85R."))


def test_what_is_loaded_goes_with_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when garbage is collected next, which may be after many others: an import loads item after item."""
    made: list[weakref.ref[Any]] = []
    make = safe_tensors.storage

    def noting(*args: Any) -> Any:
        storage = make(*args)
        made.append(weakref.ref(storage))
        return storage

    monkeypatch.setattr(safe_tensors, "storage", noting)
    stream = io.BytesIO()
    torch.save(torch.ones(5), stream)
    gc.disable()
    try:
        assert torch.equal(load_archive(stream.getvalue(), "w", path="p"), torch.ones(5))
        assert [each() for each in made] == [None]
    finally:
        gc.enable()
