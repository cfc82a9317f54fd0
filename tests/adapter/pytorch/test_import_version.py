"""What other tools wrote, as a version that jobs start from, bit for bit; and nothing of what is not what it says."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ml_flashpoint import Engine, Flashpoint
from ml_flashpoint.adapter.pytorch import import_version as module
from ml_flashpoint.adapter.pytorch.export import export_version
from ml_flashpoint.adapter.pytorch.import_version import import_version
from ml_flashpoint.cli.importing import import_ as command
from ml_flashpoint.core.persist_version import persist_version
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    InvalidNameError,
    JobInUseError,
    LoadError,
    ObjectNotFoundError,
    SaveError,
    UnsafeContentError,
)
from ml_flashpoint.persist.directory_store import DirectoryStore
from ml_flashpoint.persist.ownership import Ownership
from ml_flashpoint.persist.versions import check_parts, list_persisted
from tests.support.forked import call_team
from tests.support.loops import Stored
from tests.support.sharded import full_state
from tests.support.tensors import assert_same, blank
from tests.workers import exporting

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(40, 40), nn.Linear(40, 30)
        self.register_buffer("bits", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.ones(0, 3))
        self.register_buffer("scalar", torch.tensor(3 + seed))


STATE = {
    "tensor": torch.arange(1000.0),
    "half": torch.randn(33).bfloat16(),
    "complex": torch.randn(7, dtype=torch.complex128),
    "scalar": torch.tensor(3),
    "empty": torch.ones(0, 4),
    "nested": {"list": [torch.ones(3, dtype=torch.int8), 5], "text": "t"},
    "__odd__": 1.5,
}


@pytest.fixture
def store(tmpfs: Path) -> Iterator[Path]:
    """Where to; whatever is complete there in the end is sound, and nothing else is there."""
    yield tmpfs / "store"
    found, unusable = list_persisted(DirectoryStore(tmpfs / "store"))
    assert unusable == []
    for version in found:
        check_parts(DirectoryStore(tmpfs / "store"), version)


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder)
    return folder


@pytest.mark.parametrize("part_bytes", [1, 3000, 1 << 30])
def test_a_dcp_directory_comes_back_as_it_was(tmp_path: Path, store: Path, part_bytes: int) -> None:
    saved(tmp_path / "dcp", STATE)
    calls: list[tuple[int, int]] = []
    made = import_version(tmp_path / "dcp", store, 7, part_bytes=part_bytes, progress=lambda *each: calls.append(each))
    assert made.version.step == 7
    assert (made.version.world_size > 1) == (part_bytes < 1 << 30)
    assert calls[-1] == (made.nbytes, made.nbytes)
    again = blank(STATE)
    dcp.load(again, checkpoint_id=export_version(store, tmp_path / "out").path)
    assert_same(again, STATE)


def test_shards_of_several_ranks(tmpfs: Path, tmp_path: Path, store: Path) -> None:
    call_team(exporting.save, tmpfs, 4, 4, [2], "none", placement=(0,) * 4)
    export_version(tmpfs / "node-0" / "job", tmp_path / "dcp")
    import_version(tmp_path / "dcp", store, 2)
    made = export_version(store, tmp_path / "torch", format="torch")
    found = torch.load(made.path, weights_only=True)
    assert_same(found["sharded"], full_state(2)["sharded"])


def test_a_job_starts_from_what_it_had_exported(tmpfs: Path, tmp_path: Path, store: Path) -> None:
    model, other = Net(), Stored({"at": 5})
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(model=model, optimizer=optimizer, other=other).resume()
        for _ in range(2):
            model.last(model.first(torch.randn(2, 40))).sum().backward()
            optimizer.step()
            fp.step()
        expected = torch.rand(3)
    export_version(tmpfs / "job", tmp_path / "dcp")
    import_version(tmp_path / "dcp", store, 2)
    again, none = Net(1), Stored()
    fresh = torch.optim.AdamW(again.parameters())
    with Flashpoint(tmpfs / "new", persist=str(store)) as fp:
        assert fp.track(model=again, optimizer=fresh, other=none).resume() == 2
        assert fp.last_recovery is not None
        assert fp.last_recovery.source == "persisted"
        assert torch.equal(torch.rand(3), expected)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert none.value == {"at": 5}


@pytest.mark.parametrize("how", ["file", "folder", "shards", "dcp"])
def test_a_job_starts_from_weights(
    tmpfs: Path, tmp_path: Path, store: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {name: tensor.contiguous() for name, tensor in Net(3).state_dict().items()}
    source = tmp_path / "hf"
    source.mkdir()
    if how == "shards":
        names = sorted(weights)
        files = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
        for file, some in files.items():
            safetensors.torch.save_file({name: weights[name] for name in some}, source / file)
        places = {name: file for file, some in files.items() for name in some}
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    elif how == "dcp":
        saved(source, {"model": weights})
    else:
        safetensors.torch.save_file(weights, source / "model.safetensors")
    path = source / "model.safetensors" if how == "file" else source
    made = import_version(path, store, 0, prefix="" if how == "dcp" else "model.")
    assert made.items == len(weights) + 1
    model, other = Net(), Stored("as it was")
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(tmpfs / "job", persist=str(store), strict=True) as fp:
        assert fp.track(model=model, optimizer=optimizer, other=other).resume() == 0
        assert "no state of 'optimizer', 'other'" in caplog.text
        assert_same(dict(model.state_dict()), weights)
        assert other.value == "as it was"
        model.last(model.first(torch.randn(2, 40))).sum().backward()
        optimizer.step()
        fp.step()
    again = Net(1)
    with Flashpoint(tmpfs / "another", persist=str(store)) as fp:
        after = torch.optim.AdamW(again.parameters())
        assert fp.track(model=again, optimizer=after, other=Stored()).resume() == 1
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("part_bytes", [3000, 1 << 30])
def test_dcp_loads_what_was_imported(tmpfs: Path, tmp_path: Path, store: Path, part_bytes: int) -> None:
    import_version(saved(tmp_path / "dcp", STATE), store, 7, part_bytes=part_bytes)
    again = blank(STATE)
    with Engine.open(tmpfs / "job", persist=str(store)) as engine:
        latest = engine.latest()
        assert latest is not None
        assert latest.step == 7
        dcp.load(again, checkpoint_id=latest, storage_reader=engine.reader(latest))
    assert_same(again, STATE)


def test_weights_that_lack_something_start_no_job(tmpfs: Path, tmp_path: Path, store: Path) -> None:
    weights = {name: tensor for name, tensor in Net().state_dict().items() if name != "last.bias"}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    import_version(tmp_path, store, 0, prefix="model.")
    model = Net(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(LoadError, match=r"last\.bias"), Flashpoint(tmpfs / "job", persist=str(store)) as fp:
        fp.track(model=model).resume()
    assert_same(dict(model.state_dict()), before)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HARMED"],)


@pytest.fixture
def harmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HARMED", str(tmp_path / "harmed"))
    yield
    assert not (tmp_path / "harmed").exists()


@pytest.mark.usefixtures("harmed")
def test_no_pickle_does_more_than_describe(tmp_path: Path, store: Path) -> None:
    folder = saved(tmp_path / "dcp", {"w": torch.ones(100)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Harmful()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeContentError, match="mkdir"):
        import_version(folder, store, 1)
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UnsafeContentError, match="mkdir"):
        import_version(folder, store, 1)
    for name in ("Metadata", "MetadataIndex"):  # setattr(class, "planted", 1)
        plant = b"\x80\x02ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\n"
        (folder / ".metadata").write_bytes(plant + b"N}X\x07\x00\x00\x00plantedK\x01s\x86b.")
        with pytest.raises(UnsafeContentError, match="alter"):
            import_version(folder, store, 1)
        assert not hasattr(getattr(dcp.metadata, name), "planted")
    bad = tmp_path / "bad"
    saved(bad, {"w": torch.ones(100)})
    torch.save(Harmful(), tmp_path / "archive")
    _edit(bad, length=(tmp_path / "archive").stat().st_size)
    (bad / "__0_0.distcp").write_bytes((tmp_path / "archive").read_bytes())
    with pytest.raises(UnsafeContentError, match="mkdir"):
        import_version(bad, store, 1)
    assert list_persisted(DirectoryStore(store)) == ([], [])


def _edit(folder: Path, **fields: Any) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        for name, value in fields.items():
            setattr(place, name, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "fields",
    [
        {"relative_path": "../secret"},
        {"relative_path": "/etc/passwd"},
        {"relative_path": ".."},
        {"relative_path": 3},
        {"offset": -5},
        {"offset": 1 << 60},
        {"length": 1 << 60},
        {"length": -1},
        {"length": 17},
        {"offset": "0"},
        {"transform_descriptors": ("zstd",)},
    ],
)
def test_places_are_checked(tmp_path: Path, store: Path, fields: dict[str, Any]) -> None:
    folder = saved(tmp_path / "dcp", {"w": torch.ones(100), "n": 3})
    (tmp_path / "secret").write_bytes(b"x" * 10_000)
    _edit(folder, **fields)
    with pytest.raises(FlashpointError):
        import_version(folder, store, 1)
    assert list_persisted(DirectoryStore(store)) == ([], [])


@pytest.mark.parametrize("path", ["../secret", "sub/../../secret", "/etc/hosts", ".."])
def test_nothing_is_read_beyond_the_folder(tmp_path: Path, store: Path, path: str) -> None:
    folder = saved(tmp_path / "dcp", {"n": 3})  # bytes, which are taken as they are
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    _edit(folder, relative_path=path, offset=0, length=50)
    with pytest.raises(InvalidNameError):
        import_version(folder, store, 1)
    assert list_persisted(DirectoryStore(store)) == ([], [])


def test_a_tensor_of_which_a_shard_is_nowhere_is_refused(tmp_path: Path, store: Path) -> None:
    folder = saved(tmp_path / "dcp", {"w": torch.ones(100)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    of = metadata.state_dict_metadata["w"]
    of.chunks.append(dcp.metadata.ChunkStorageMetadata(torch.Size([100]), torch.Size([100])))
    of.size = torch.Size([200])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="does not say where 'w' is"):
        import_version(folder, store, 1)
    assert list_persisted(DirectoryStore(store)) == ([], [])


def test_descriptions_are_checked(tmp_path: Path, store: Path) -> None:
    folder = saved(tmp_path / "dcp", {"w": torch.ones(100), "n": 3})
    original = (folder / ".metadata").read_bytes()

    def refuse(change: Any, error: type[FlashpointError] = DamagedError) -> None:
        metadata = pickle.loads(original)
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(error):
            import_version(folder, store, 1)

    of = "state_dict_metadata"
    refuse(lambda m: setattr(getattr(m, of)["w"].properties, "dtype", torch.float64))
    refuse(lambda m: setattr(getattr(m, of)["w"].chunks[0], "sizes", torch.Size([99])))
    refuse(lambda m: setattr(getattr(m, of)["w"].chunks[0], "offsets", torch.Size([1, 2])))
    refuse(lambda m: setattr(getattr(m, of)["w"].chunks[0], "sizes", torch.Size([1 << 62])), FlashpointError)
    refuse(lambda m: getattr(m, of)["w"].chunks.clear())
    refuse(lambda m: getattr(m, of).update(v=getattr(m, of)["w"]))
    refuse(lambda m: getattr(m, of).pop("w"))
    refuse(lambda m: setattr(m, "storage_data", None), LoadError)
    refuse(lambda m: setattr(m, of, []))
    for text in (b"", b"\x80\x04", original[:-20], b"garbage"):
        (folder / ".metadata").write_bytes(text)
        with pytest.raises(DamagedError):
            import_version(folder, store, 1)
    assert list_persisted(DirectoryStore(store)) == ([], [])


def test_safetensors_are_checked(tmp_path: Path, store: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(ObjectNotFoundError, match="neither a DCP directory"):
        import_version(folder, store, 1)
    with pytest.raises(ObjectNotFoundError):
        import_version(folder / "nothing", store, 1)
    safetensors.torch.save_file({"a": torch.ones(10)}, folder / "a.safetensors")
    safetensors.torch.save_file({"a": torch.ones(10)}, folder / "b.safetensors")
    with pytest.raises(LoadError, match="two files"):
        import_version(folder, store, 1)
    index = folder / "model.safetensors.index.json"
    for content in (
        "[]",
        "{",
        '{"weight_map": {"a": "../a.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "a.bin"}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"z": "a.safetensors"}}',
        '{"weight_map": {"a": "c.safetensors"}}',
    ):
        index.write_text(content)
        with pytest.raises(FlashpointError):
            import_version(folder, store, 1)
    index.write_text('{"weight_map": {"a": "a.safetensors"}}')
    data = (folder / "a.safetensors").read_bytes()
    for damaged in (data[:-1], data + b"x", b"\xff" * 8 + data[8:], b""):
        (folder / "a.safetensors").write_bytes(damaged)
        with pytest.raises(FlashpointError):
            import_version(folder, store, 1)
    (folder / "a.safetensors").unlink()
    os.mkfifo(folder / "a.safetensors")
    with pytest.raises(LoadError, match="no regular file"):
        import_version(folder, store, 1)
    assert list_persisted(DirectoryStore(store)) == ([], [])


def test_nothing_is_left_of_an_import_that_failed(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "dcp", STATE)

    def fail(*args: object) -> None:
        raise SaveError("no marker")

    with monkeypatch.context() as patched:
        patched.setattr(module, "complete", fail)
        with pytest.raises(SaveError, match="no marker"):
            import_version(folder, store, 1, part_bytes=1)
    assert os.listdir(store) == ["lock"]
    owner = Ownership(DirectoryStore(store))
    owner.take()
    with pytest.raises(JobInUseError):
        import_version(folder, store, 1)
    owner.release()


def test_it_counts_as_the_newest(tmpfs: Path, tmp_path: Path, store: Path) -> None:
    with Flashpoint(tmpfs / "job") as fp:
        fp.track(value=Stored(1)).save(900)
    persist_version(tmpfs / "job", store)
    folder = saved(tmp_path / "dcp", STATE)
    import_version(folder, store, 5)
    assert [version.step for version in list_persisted(DirectoryStore(store))[0]] == [5, 900]


def test_the_command(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "dcp", {"w": torch.ones(100)})
    assert command(str(folder), str(store), 3) == 0
    assert capsys.readouterr().out.startswith("imported 2 items, ")
    assert command(str(folder), str(store), 4, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["url"]) == (4, f"file://{store}")
    assert command(str(folder), str(store), 4, prefix="model.") == 2
    assert command(str(tmp_path / "nothing"), str(store), 4) == 2
    with pytest.raises(InvalidArgumentError, match="step"):
        import_version(folder, store, -1)
    (tmp_path / "job" / ".flashpoint").mkdir(parents=True)
    with pytest.raises(InvalidArgumentError, match="base container"):
        import_version(folder, tmp_path / "job", 1)
