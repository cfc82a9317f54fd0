"""Exports are the version, bit for bit, to tools that know nothing of this package; or they are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ml_flashpoint import Checkpointer, Flashpoint
from ml_flashpoint.format.errors import (
    DigestMismatchError,
    FlashpointError,
    InvalidArgumentError,
    LoadError,
    ObjectNotFoundError,
    PrunedError,
    SaveError,
    UnsafeContentError,
)
from ml_flashpoint.format.names import object_name
from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.tools import items
from ml_flashpoint.tools.copy import copy_version, persist_version
from ml_flashpoint.tools.export import Exported, export_version
from tests.support.commands import flashpoint
from tests.support.dcp import Door
from tests.support.forked import call_team
from tests.support.processes import child_environment
from tests.support.sharded import full_state
from tests.support.tensors import assert_same, blank
from tests.workers import exporting

pytestmark = pytest.mark.slow

FORMATS = ("dcp", "safetensors", "torch")
_READ = """
import sys
import torch, torch.distributed.checkpoint as dcp, safetensors.torch
state = torch.load(sys.argv[1], weights_only=True)
again = {"sharded": {name: torch.zeros_like(t) for name, t in state["sharded"].items()}}
dcp.load(again, checkpoint_id=sys.argv[2])
files = safetensors.torch.load_file(sys.argv[3] + "/model.safetensors")
for name, tensor in state["sharded"].items():
    assert torch.equal(again["sharded"][name], tensor), name
    assert torch.equal(files["sharded." + name], tensor), name
assert not any(name.startswith("ml_flashpoint") for name in sys.modules)
print(sum(float(tensor.sum()) for tensor in state["sharded"].values()))
"""


def _flat(state: Any, name: str = "") -> dict[str, Any]:
    pairs = state.items() if isinstance(state, dict) else enumerate(state)
    found: dict[str, Any] = {}
    for key, value in pairs:
        path = f"{name}{key}"
        nested = isinstance(value, dict) or (isinstance(value, list) and any(torch.is_tensor(v) for v in value))
        found |= _flat(value, f"{path}.") if nested else {path: value}
    return found


def _check(made: Exported, format: str, expected: dict[str, Any]) -> None:
    if format == "torch":
        assert_same(torch.load(made.path, weights_only=True), expected)
    elif format == "dcp":
        found = blank(expected)
        dcp.load(found, storage_reader=dcp.FileSystemReader(made.path))  # type: ignore[attr-defined]
        assert_same(found, expected)
    else:
        flat = _flat(expected)
        tensors = {name: value for name, value in flat.items() if torch.is_tensor(value)}
        assert_same(_files(made.path), _sorted(tensors))
        assert sorted(made.left_out) == sorted(flat.keys() - tensors.keys())


def _files(folder: Path) -> dict[str, torch.Tensor]:
    files = map(safetensors.torch.load_file, folder.glob("*.safetensors"))
    return _sorted({name: tensor for file in files for name, tensor in file.items()})


def _sorted(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in sorted(tensors)}


@pytest.mark.parametrize(("placement", "replication"), [((0, 0), "none"), ((0, 1), "pairwise"), ((0, 1, 2, 0), "none")])
def test_what_several_ranks_hold_is_put_together(
    tmpfs: Path, tmp_path: Path, placement: tuple[int, ...], replication: str
) -> None:
    call_team(exporting.save, tmpfs, len(placement), len(placement), [1, 2], replication, placement=placement)
    bases = [tmpfs / f"node-{node}" / "job" for node in sorted(set(placement))]
    sources = bases[1:] if replication == "pairwise" else bases  # each of a pair has it all
    for format in FORMATS:
        made = export_version(sources, tmp_path / "out" / format, format=format)
        assert made.step == 2
        _check(made, format, full_state(2))
        assert sorted(os.listdir(made.path.parent)) == sorted(FORMATS[: FORMATS.index(format) + 1])
        if len(bases) < 3:
            continue
        with pytest.raises(ObjectNotFoundError, match="no version is complete here"):
            export_version(bases[0], tmp_path / "of one", format=format)
        with pytest.raises(ObjectNotFoundError, match="the parts of ranks 2 of 4 are missing"):
            export_version(bases[:2], tmp_path / "of two", format=format)
    if len(bases) == 3:
        copies = [tmp_path / f"of-node-{number}" for number in range(len(bases))]
        for base, copied in zip(bases, copies, strict=True):
            copy_version(base, copied, partial=True)
        _check(export_version(copies, tmp_path / "of copies", format="torch"), "torch", full_state(2))


@pytest.fixture(params=["path", "memory"])
def url(request: pytest.FixtureRequest, tmpfs: Path) -> Iterator[str]:
    """Steps 1 and 2 of two ranks on a node, persisted."""
    call_team(exporting.save, tmpfs, 2, 2, [1, 2], "none", placement=(0, 0))
    where = str(tmpfs / "store") if request.param == "path" else f"memory://{tmpfs.name}"
    persist_version(tmpfs / "node-0" / "job", where)
    yield where
    if request.param == "memory":
        fsspec.filesystem("memory").rm(where, recursive=True)


def test_other_programs_read_what_is_persisted(
    url: str, tmpfs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / format) for format in ("torch", "dcp", "safetensors")]
    for path in paths:
        assert export_version(url, path, 2, format=Path(path).name).step == 2
    done = subprocess.run([sys.executable, "-c", _READ, *paths], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == sum(float(t.sum()) for t in full_state(2)["sharded"].values())
    assert flashpoint("diff", url, tmpfs / "node-0" / "job") == 0
    assert capsys.readouterr().out.startswith("the same: ")
    assert flashpoint("inspect", f"{url}@2", "--prefix", "sharded.rows", "--json") == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert item["ranks"] == [0, 1]
    for wrong, error in (((url, 7), "no complete version of step 7"), ((f"{url}-2", None), "no complete version")):
        with pytest.raises(ObjectNotFoundError, match=error):
            export_version(wrong[0], tmp_path / "out", wrong[1])


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("how", ["content", "gone"])
def test_what_one_source_lacks_another_gives(tmpfs: Path, tmp_path: Path, how: str) -> None:
    call_team(exporting.save, tmpfs, 2, 2, [1], "none", placement=(0, 0))
    base, store = tmpfs / "node-0" / "job", tmpfs / "store"
    persist_version(base, store)
    [version] = open_store(store).versions()
    path = store / version.folder / object_name(1, version.save_id)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(byte ^ (at % 4096 == 0) for at, byte in enumerate(path.read_bytes())))
    with pytest.raises((DigestMismatchError, ObjectNotFoundError)):
        export_version(store, tmp_path / "out")
    assert not os.listdir(tmp_path)
    made = export_version([store, base], tmp_path / "out", format="torch")
    _check(made, "torch", full_state(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(40, 40), nn.Linear(40, 40)
        self.last.weight = self.first.weight
        self.register_buffer("bits", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.ones(0, 3))
        self.register_buffer("scalar", torch.tensor(3))


Trained = tuple[Path, Net, torch.optim.Optimizer]


@pytest.fixture
def trained(tmpfs: Path) -> Trained:
    """A job of the façade that has ended."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(2):
            model.last(model.first(torch.randn(2, 40))).sum().backward()
            optimizer.step()
            fp.step()
            fp.wait()
    return tmpfs / "job", model, optimizer


def test_the_state_of_a_model_under_its_own_names(trained: Trained, tmp_path: Path) -> None:
    base, model, _ = trained
    made = export_version(base, tmp_path / "model", format="safetensors", prefix="model.")
    assert_same(_files(made.path), _sorted(model.state_dict()))
    assert os.listdir(made.path) == ["model.safetensors"]
    made = export_version(base, tmp_path / "model.pt", format="torch", prefix="model.")
    assert_same(dict(torch.load(made.path, weights_only=True)), dict(model.state_dict()))
    made = export_version(base, tmp_path / "dcp", 2)
    state = {"model": blank(dict(model.state_dict()))}
    dcp.load(state, checkpoint_id=made.path)
    assert_same(state["model"], dict(model.state_dict()))
    with pytest.raises(InvalidArgumentError, match=r"prefix='model\.'"):
        export_version(base, tmp_path / "other", prefix="model.")


@pytest.mark.parametrize("shard_bytes", [7000, 1 << 30])
def test_a_folder_as_hugging_face_has_it(trained: Trained, tmp_path: Path, shard_bytes: int) -> None:
    base, model, _ = trained
    names = {"model.first.weight": "h.0.weight", "model.bits": "bits", "model.first.bias": "model.first.bias"}
    options: dict[str, Any] = {"format": "hf", "shard_bytes": shard_bytes}
    whole = export_version(base, tmp_path / "prefix", prefix="model.", **options)
    mapped = export_version(base, tmp_path / "mapped", names=names, **options)
    assert (mapped.tensors, mapped.left_out) == (3, ())
    state = dict(model.state_dict())
    for made, expected in (
        (whole, state),
        (mapped, {new: state[old.removeprefix("model.")] for old, new in names.items()}),
    ):
        files = dict.fromkeys(expected, "model.safetensors")
        if made is whole and shard_bytes == 7000:
            index = json.loads((made.path / "model.safetensors.index.json").read_text())
            assert index["metadata"] == {"total_size": made.nbytes}
            files = index["weight_map"]
            assert set(files.values()) == {f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}
        assert files.keys() == expected.keys()
        for name, file in files.items():
            with safe_open(made.path / file, "pt") as opened:
                assert opened.metadata()["format"] == "pt"  # transformers wants it
                assert_same(opened.get_tensor(name), expected[name])


def test_names_that_cannot_be(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, *_ = trained
    for wrong, why in [
        ({}, "must select the names of the model"),
        ({"names": {}}, "must be a dict of new names"),
        ({"names": {"model.bits": 3}}, "must be a dict of new names"),
        ({"names": {"model.bits": "a"}, "prefix": "model."}, "not both"),
        ({"names": {"model.bits": "a", "model.empty": "a"}}, "the same name"),
        ({"names": {"model.bits": "a", "modle": "b"}}, "has none of 1 names"),
        ({"names": {"model.bits": "a"}, "format": "dcp"}, "cannot be changed"),
    ]:
        options: dict[str, Any] = {"format": "hf", **wrong}
        with pytest.raises(InvalidArgumentError, match=why):
            export_version(base, tmp_path / "out", **options)
    for number, text in enumerate(("[]", '{"model.bits": 1}', "{", "[" * 100_000, '{"model.bits": "b"}')):
        (tmp_path / "map.json").write_text(text)
        options_given = ["--to", tmp_path / "out", "--format", "hf", "--name-map", tmp_path / "map.json"]
        assert flashpoint("export", base, *options_given) == (0 if number == 4 else 2)
    assert "--name-map" in capsys.readouterr().err
    assert [*_files(tmp_path / "out")] == ["b"]


def _of_two_groups(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    def build(model: nn.Sequential) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": part.parameters(), **options} for part in model]
        groups[1]["weight_decay"] = 0.5
        return make(groups, lr=0.1)

    return build


@pytest.mark.parametrize("by", ["export", "reader"])
@pytest.mark.parametrize(
    "build",
    [
        _of_two_groups(torch.optim.AdamW),
        _of_two_groups(torch.optim.AdamW, lr=torch.tensor(0.25)),
        _of_two_groups(torch.optim.SGD),
        _of_two_groups(torch.optim.SGD, momentum=0.9),
    ],
    ids=["adamw", "tensor lr", "sgd", "momentum"],
)
def test_dcp_loads_an_optimizer_of_the_facade_by_torchs_own_names(
    tmpfs: Path, tmp_path: Path, build: Callable[[nn.Sequential], torch.optim.Optimizer], by: str
) -> None:
    model, again = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2))
    optimizer, restored = build(model), build(again)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 2
    with Checkpointer(tmpfs / "job") as ckpt:
        ckpt.load({"model": model, "optimizer": optimizer})
        ckpt.save(1, {"model": model, "optimizer": optimizer}).verified.result(60)
        given: dict[str, Any] = {"checkpoint_id": ckpt.id(1), "storage_reader": ckpt.reader()}
        if by == "export":
            given = {"checkpoint_id": export_version(tmpfs / "job", tmp_path / "dcp").path}
        own, of_optimizer = get_state_dict(again, restored)
        state: dict[str, Any] = {"model": own, "optimizer": of_optimizer}
        dcp.load(state, **given)
        groups: Any = get_state_dict(again, restored)[1]["param_groups"]
        dcp.load({"optimizer": {"param_groups": groups}}, **given)
    set_state_dict(again, restored, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(restored.state_dict(), optimizer.state_dict())
    assert_same(groups, state["optimizer"]["param_groups"])


def test_every_kind_of_item(door: Door, tmp_path: Path) -> None:
    state = {
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.randn(3, dtype=torch.complex128),
        "tied": [torch.ones(4)] * 2,
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "text": "t",
        "numbers": [1, 2.5, None],
    }
    door.save(state, 1)
    _check(export_version(door.base, tmp_path / "torch", format="torch"), "torch", state)
    for format, first in (("dcp", "sparse"), ("safetensors", "sparse")):
        with pytest.raises(LoadError, match=f"{format} has no place for '{first}'"):
            export_version(door.base, tmp_path / format, format=format)
    del state["sparse"]
    door.save(state, 2)
    _check(export_version(door.base, tmp_path / "dcp"), "dcp", state)
    with pytest.raises(LoadError, match=r"safetensors has no place for 'complex' \(.*complex128"):
        export_version(door.base, tmp_path / "safetensors", format="safetensors")
    assert sorted(os.listdir(tmp_path)) == ["dcp", "torch"]


class Config:
    def __init__(self) -> None:
        self.width = 3


def test_types_of_the_users_own(make_door: Callable[..., Door], tmp_path: Path) -> None:
    door = make_door(safe_globals=[Config])
    door.save({"config": Config(), "w": torch.ones(3)}, 1)
    with pytest.raises(UnsafeContentError, match="Config"):
        export_version(door.base, tmp_path / "torch", format="torch")
    made = export_version(door.base, tmp_path / "dcp")
    state = {"w": torch.zeros(3), "config": None}
    with torch.serialization.safe_globals([Config]):
        dcp.load(state, checkpoint_id=made.path)
    assert state["config"].width == 3  # type: ignore[union-attr]


@pytest.mark.damages_on_purpose
def test_nothing_is_left_of_what_went_is_damaged_or_cannot_be_written(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.save({"w": torch.ones(100_000)}, 1)
    door.save({"w": torch.full((100_000,), 2.0)}, 2)
    door.settle()
    (tmp_path / "there").symlink_to("nowhere")
    (tmp_path / "file").write_text("")

    def pruned(*args: Any) -> None:
        raise PrunedError("the version was pruned while it was read")

    with monkeypatch.context() as patched:
        patched.setattr(items.VersionItems, "written", pruned)
        for format in FORMATS:
            with pytest.raises(PrunedError):
                export_version(door.base, tmp_path / "out", 2, format=format)
    with open(door.object_path(2), "r+b") as file:
        file.seek(200_000)
        file.write(b"\x55" * 8)
    for format in FORMATS:
        with pytest.raises(DigestMismatchError):
            export_version(door.base, tmp_path / "out", 2, format=format)
        with pytest.raises(SaveError, match="is there already"):
            export_version(door.base, tmp_path / "there", format=format)
        with pytest.raises(FlashpointError):
            export_version(door.base, tmp_path / "file" / "out", format=format)
    assert sorted(os.listdir(tmp_path)) == ["file", "there"]


@pytest.mark.parametrize("size", [3 << 20, 5 << 20])
def test_an_export_to_a_full_disk_is_not_there(door: Door, small_tmpfs: Path, size: int) -> None:
    """Neither is the process killed by a store to a mapped page that the disk has no room for."""
    (small_tmpfs / "other").write_bytes(bytes(3 << 19))
    door.save({"model": {"weight": torch.ones(size, dtype=torch.uint8)}}, 1)
    for format in FORMATS:
        with pytest.raises(SaveError, match=r"cannot be written: .*No space left"):
            export_version(door.base, small_tmpfs / "out", format=format)
        assert [path.name for path in small_tmpfs.iterdir()] == ["other"]


def test_bad_arguments(door: Door, tmpfs: Path, tmp_path: Path) -> None:
    door.save({"w": torch.ones(10)}, 1)
    with pytest.raises(InvalidArgumentError, match=r"format must be .*, got 'zip'"):
        export_version(door.base, tmp_path / "out", format="zip")
    with pytest.raises(InvalidArgumentError, match="prefix='modell'"):
        export_version(door.base, tmp_path / "out", format="torch", prefix="modell")
    manager = LocalCheckpointManager(tmpfs, "local")
    manager.save(BasicTensorAwareStateDict({"a": torch.ones(3)}), 1)
    manager.close()
    persist_version(manager.local_ckpt_dir, tmpfs / "store")
    for source in (manager.local_ckpt_dir, tmpfs / "store"):
        with pytest.raises(LoadError, match="was not saved through DCP"):
            export_version(source, tmp_path / "out")


def test_the_command(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, model, _ = trained
    to = ["--to", str(tmp_path / "hf"), "--format", "safetensors", "--prefix", "model."]
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", "export", f"{base}@2", *to]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"exported step 2 to {tmp_path / 'hf'}: 7 tensors\n"), done.stderr
    assert_same(_files(tmp_path / "hf"), _sorted(model.state_dict()))

    to = ["--to", str(tmp_path / "dcp")]
    assert flashpoint("export", base, *to, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["export"], told["step"], told["left_out"]) == (str(tmp_path / "dcp"), 2, [])
    assert flashpoint("export", base, *to) == 1
    assert "is there already" in capsys.readouterr().err
    assert flashpoint("export", f"{base}@9", *to) == 2
    assert "no complete version of step 9" in capsys.readouterr().err
    assert flashpoint("export", f"{base}@1", f"{base}@2", *to) == 2
    assert "the sources name different steps" in capsys.readouterr().err


def test_a_part_that_nobody_has_saved_is_not_made_up(
    tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_team(exporting.save, tmpfs, 2, 2, [1], "none", placement=(0, 0))
    read = items.decode_metadata

    def lacking(data: bytes, **options: Any) -> Any:
        metadata = read(data, **options)
        last = [index for index in metadata.storage_data if index.fqn == "sharded.rows"][-1]
        del metadata.storage_data[last]
        return metadata

    monkeypatch.setattr(items, "decode_metadata", lacking)
    for format in FORMATS:
        with pytest.raises(LoadError, match=r"where all of 'sharded\.rows' is"):
            export_version(tmpfs / "node-0" / "job", tmp_path / "out", format=format)
    assert not os.listdir(tmp_path)


@pytest.mark.timeout(300)
def test_memory_stays_bounded(tmpfs: Path, tmp_path: Path) -> None:
    """A version of 192 MiB is exported from either tier by a process that may have 96 MiB more than
    before: whatever it asks for beyond that, be it used or not, is refused by the kernel."""
    call_team(exporting.save_large, tmpfs, 2, 2, 12, 16 << 20, placement=(0, 0))
    base, store = tmpfs / "node-0" / "job", tmp_path / "store"
    persist_version(base, store)
    # Or malloc would keep what is free, and nobody could tell it from what is in use.
    environment = child_environment(MALLOC_MMAP_THRESHOLD_="131072", MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="1")
    argv = [sys.executable, "-c", _BOUNDED, str(tmp_path), str(base), str(store)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["refused", *(f"base-{each}" for each in (*FORMATS, "hf")), "store-dcp"]


_BOUNDED = """
import contextlib, resource, sys, threading
from ml_flashpoint.tools import export
folder, *sources = sys.argv[1:]
export._DCP_FILE_BYTES = 16 << 20
threading.stack_size(1 << 18)  # stacks count, too

@contextlib.contextmanager
def bounded():
    now = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + (96 << 20), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))

try:
    with bounded():
        bytearray(100 << 20)
except MemoryError:
    print("refused")
for tier, source in zip(("base", "store"), sources):
    for format in ("dcp", "safetensors", "torch", "hf") if tier == "base" else ("dcp",):
        prefix = "t" if format == "hf" else ""
        with bounded():
            export.export_version(source, f"{folder}/{format}-{tier}", format=format, prefix=prefix)
        print(f"{tier}-{format}", flush=True)
"""
