"""Values come back from an archive as they were, and forged ones never reach past their bytes."""

from __future__ import annotations

import dataclasses
import enum
import io
import random
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from ml_flashpoint.format.errors import DamagedError, UnsafeContentError
from ml_flashpoint.state.archive import check_bytes, load_archive, save_archive, warn_of_old_torch
from tests.local.states import assert_equal
from tests.support.forked import Child, call, preload
from tests.workers.fuzz_archives import VALUES, archive_of, fuzz, parts_of, pickled, saved

preload("tests.workers.fuzz_archives")


class Suspect:
    """A type that nobody has listed."""


@dataclasses.dataclass
class Hooked:
    """A dataclass that has a say in what is saved of it."""

    value: int

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}


@dataclasses.dataclass
class Settings:
    rate: float
    names: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        made.append("Settings")


@dataclasses.dataclass(frozen=True)
class Task:
    name: str

    def __call__(self, *args: Any) -> torch.Tensor:
        made.append(self.name)
        return torch.ones(1)


@dataclasses.dataclass(slots=True)
class SlottedTask:
    name: str

    def __call__(self, *args: Any) -> torch.Tensor:
        made.append(self.name)
        return torch.ones(1)


class Pair(NamedTuple):
    first: Any
    second: Any


class Colour(enum.Enum):
    RED = 1


made: list[str] = []


def _load(archive: bytes, **options: Any) -> Any:
    return load_archive(archive, "key", path="path", **options)


def _same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor) and one.is_nested:
        one, other = list(one.unbind()), list(other.unbind())
    assert_equal(one, other)


OURS = {
    **VALUES,
    "types of this process": [Settings(0.5, ["a"]), Pair(1, Pair(torch.ones(2), None)), {Colour.RED: Colour.RED}],
    "an instance that can be called": {"twice": [task := Task("warmup"), task], task: SlottedTask("b")},
    "generators": [random.getstate(), np.random.default_rng(1).bit_generator.state],
}


@pytest.mark.parametrize("name", sorted(OURS))
def test_it_comes_back_as_it_was(name: str) -> None:
    archive = save_archive(OURS[name], "value")
    made.clear()
    _same(_load(archive), OURS[name])
    again = torch.load(check_bytes(archive, "key", path="path"), weights_only=False)
    if name != "arrays":  # NumPy unpickles numbers in this machine's order of bytes, whatever they were saved in
        _same(again, OURS[name])
    assert "Settings" not in made, "loading runs no constructor"


def test_what_shared_memory_shares_it_again() -> None:
    base = torch.arange(10.0)
    array = np.arange(3)
    generator = torch.Generator().manual_seed(3)
    one, other, first, second, same, again = _load(saved([base[2:5], base[4:7], array, array, generator, generator]))
    one[2] = 70
    assert other[0] == 70
    assert first is second
    assert same is again
    assert torch.equal(same.get_state(), generator.get_state())


def test_attributes_of_tensors_come_back() -> None:
    tensor = torch.ones(2)
    tensor.note = "x"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "y"  # type: ignore[attr-defined]
    one, other = _load(saved([tensor, parameter]))
    assert (one.note, other.note, type(other)) == ("x", "y", torch.nn.Parameter)


def test_an_old_torch_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_old_torch()
    assert not caplog.records
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    warn_of_old_torch()
    warn_of_old_torch()
    assert [record.getMessage().count("CVE-2026-24747") for record in caplog.records] == [1]


# ---- what is not allowed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [Suspect(), Hooked(1), len, Suspect])
def test_what_is_not_allowed_is_refused_with_its_place_unless_it_is_listed(value: Any) -> None:
    kind = value if callable(value) else type(value)
    with pytest.raises(UnsafeContentError, match=rf"model\.part\.1.*{kind.__name__}"):
        save_archive({"part": [0, value]}, "model")
    for allowed in ([kind], [(kind, f"{kind.__module__}.{kind.__qualname__}")]):
        archive = save_archive({"part": [0, value]}, "model", allowed=allowed)
        assert type(_load(archive, allowed=allowed)["part"][1]) is type(value)
        with pytest.raises(UnsafeContentError, match=kind.__name__):
            _load(archive)


@pytest.mark.parametrize("value", [Settings(1.0), Pair(1, 2), Colour.RED])
def test_a_type_that_has_moved_loads_if_it_is_listed_by_its_old_name(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(value)
    with monkeypatch.context() as before:
        train: Any = types.ModuleType("train")
        setattr(train, kind.__name__, kind)
        before.setitem(sys.modules, "train", train)
        before.setattr(kind, "__module__", "train")
        archive = save_archive([value], "value")
    with pytest.raises(UnsafeContentError, match=rf"train\.{kind.__name__}"):
        _load(archive)
    assert _load(archive, allowed=[(kind, f"train.{kind.__name__}")]) == [value]
    with pytest.raises(UnsafeContentError, match=rf"train\.{kind.__name__}"):
        _load(archive, allowed=[(Suspect, f"train.{kind.__name__}")])


def test_what_the_program_has_allowed_stays_allowed_and_nothing_else_becomes_so() -> None:
    for listed in (Suspect, (Suspect, f"{__name__}.Suspect")):
        with torch.serialization.safe_globals([listed]):
            archive = save_archive(Suspect(), "value", allowed=[Suspect])
            assert isinstance(_load(archive, allowed=[Suspect]), Suspect)
            assert listed in torch.serialization.get_safe_globals()
    before = set(torch.serialization.get_safe_globals())
    _load(archive, allowed=[Suspect])
    assert set(torch.serialization.get_safe_globals()) == before


def test_threads_load_beside_one_another() -> None:
    archive = save_archive([np.arange(3), Suspect()], "value", allowed=[Suspect])
    failed: list[BaseException] = []

    def load() -> None:
        try:
            for _ in range(30):
                _load(archive, allowed=[Suspect])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# ---- forged -------------------------------------------------------------------------------------------------------


def _forged(value: Any, *changes: tuple[bytes, bytes], cut: int | None = None) -> bytes:
    pickle, records = parts_of(saved(value))
    for before, after in changes:
        assert before in pickle
        pickle = pickle.replace(before, after)
    return archive_of(pickle, {name: data[:cut] for name, data in records.items()})


def _compressed() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in {"data.pkl": b"\x80\x02N.", "version": b"3\n", "data/0": bytes(10_000_000)}.items():
            file.writestr(f"archive/{name}", data)
    return stream.getvalue()


_FOUR = torch.arange(4, dtype=torch.float32)
_COO = torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.ones(2), (4,), check_invariants=False)
_UNSORTED = torch.sparse_coo_tensor(
    torch.tensor([[1, 1]]), torch.ones(2), (4,), is_coalesced=True, check_invariants=False
)
_CSR = torch.sparse_csr_tensor(
    torch.tensor([0, 1, 2]), torch.tensor([0, 7]), torch.ones(2), (2, 2), check_invariants=False
)
_QUANTIZED = torch.quantize_per_channel(torch.ones(7, 3), torch.ones(7), torch.zeros(7), 0, torch.qint8)

FORGED = {
    "a dtype of objects": _forged(np.arange(2), (b"<i8", b"|O8")),
    "a dtype that grows": _forged(np.zeros(2, "V1"), (b"|V1", b"|V9")),
    "fewer bytes than an array has": _forged(np.zeros(2), (b"K\x02\x85", b"K\x7f\x85")),
    "a scalar of a pointer": _forged(np.int64(5), (b"<i8", b"|O8")),
    "a storage that is larger than its bytes": _forged(_FOUR, (b"K\x04t", b"M\xff\xfft")),
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
    "another axis than that of the scales": _forged(_QUANTIZED, (b"K\x00t", b"K\x01t")),
    "an absurd bytearray": archive_of(b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + b"\xff" * 7 + b"\x7f\x85R."),
    "an absurd tensor": archive_of(b"\x80\x02ctorch\nFloatTensor\n\x8a\x08" + b"\xff" * 7 + b"\x1f\x85R."),
    "records whose names differ in case": archive_of(b"\x80\x02N.", {"Data.pkl": b"\x80\x02K\x01."}),
    "a compressed record": _compressed(),
}
if TorchVersion(torch.__version__) < "2.10":  # which is warned of
    del FORGED["a storage that is larger than its bytes"], FORGED["a storage that lost bytes"]


@pytest.mark.parametrize("name", sorted(FORGED))
def test_what_is_forged_is_damaged(name: str) -> None:
    with pytest.raises(DamagedError, match="key"):
        _load(FORGED[name])


@pytest.mark.parametrize("value", [np.zeros(2), np.float32(1), np.dtype("f8")])
def test_what_torch_would_read_unchecked_is_refused_whatever_the_program_has_allowed(value: Any) -> None:
    with torch.serialization.safe_globals([(np.ndarray, "numpy.ndarray"), np.dtype]):
        with pytest.raises(UnsafeContentError, match="numpy"):
            _load(pickled(value), allowed=[np.dtype, np.ndarray])
        assert save_archive(value, "value")


@pytest.mark.parametrize("cut", [0, 4, 60, 200, -30, -1])
def test_what_is_cut_or_garbage_is_refused(cut: int) -> None:
    archive = saved({"a": torch.ones(3), "b": [1, 2]})
    for forged in (archive[:cut], b"PK\x03\x04" + archive[max(5, cut) :], b"PK\x03\x04" + bytes(max(0, cut))):
        with pytest.raises((DamagedError, UnsafeContentError)):
            _load(forged)


def test_a_name_that_is_not_allowed_is_named_and_not_called(tmp_path: Path) -> None:
    path = str(tmp_path / "made").encode()
    for module in (b"os", b"posix"):
        forged = archive_of(b"\x80\x02c" + module + b"\nmkdir\nX" + len(path).to_bytes(4, "little") + path + b"\x85R.")
        with pytest.raises(UnsafeContentError, match=r"\.mkdir"):
            _load(forged)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [Task, SlottedTask])
def test_an_instance_that_can_be_called_is_not_called(kind: Any) -> None:
    made.clear()
    task = parts_of(saved(kind("forged")))[0][2:-1]
    forged = archive_of(b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(" + task + b"ctorch\nTensor\n)}tR.")
    with pytest.raises(DamagedError, match="can be called"):
        _load(forged)
    tensor = torch.ones(2)
    tensor.note = "x"  # type: ignore[attr-defined]
    assert save_archive([tensor, Settings(1.0)], "value")
    with pytest.raises(UnsafeContentError, match="can be called"):
        save_archive([tensor, kind("warmup")], "value")
    assert made == ["Settings"], "which this test has made"


def test_a_name_is_the_same_wherever_its_module_ends() -> None:
    pickle = pickled(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 4)]))
    for name in (b"ctorch\n_utils._rebuild_nested_tensor\n", b"ctorch._utils\n_rebuild_nested_tensor\n"):
        forged, records = parts_of(pickle)
        forged = forged.replace(b"ctorch._utils\n_rebuild_nested_tensor\n", name)
        with pytest.raises(UnsafeContentError, match=r"torch\._utils\._rebuild_nested_tensor"):
            _load(archive_of(forged, records))


def test_types_that_archives_name_must_be_of_their_kind() -> None:
    name = f"{__name__}:Pair".encode()
    for other in (b"subprocess:Popen", b"argparse:Namespace"):
        forged = _forged(Pair(1, 2), (name, other), (bytes([len(name)]) + b"\0\0\0", bytes([len(other)]) + b"\0\0\0"))
        with pytest.raises(UnsafeContentError, match=other.decode().replace(":", ".")):
            _load(forged)


def test_no_code_of_a_module_runs_because_an_archive_names_something_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy: Any = types.ModuleType("lazy")
    asked: list[str] = []

    def made_at_once(name: str) -> type:
        asked.append(name)
        return Pair

    lazy.__getattr__ = made_at_once
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    name, other = f"{__name__}:Pair".encode(), b"lazy:Pair"
    forged = _forged(Pair(1, 2), (name, other), (bytes([len(name)]) + b"\0\0\0", bytes([len(other)]) + b"\0\0\0"))
    with pytest.raises(UnsafeContentError, match=r"lazy\.Pair"):
        _load(forged)
    assert asked == []


@pytest.mark.slow
def test_forged_archives_are_refused_or_good() -> None:
    call(fuzz, 100, 1)  # in a process of its own, which what it looks for would end


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(4))
def test_many_forged_archives_are_refused_or_good(seed: int) -> None:
    with Child(fuzz, 20_000, seed) as child:
        child.result(3000)
