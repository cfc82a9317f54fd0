"""Nothing that a checkpoint says is executed: objects are crafted here as somebody who can write them would."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import io
import json
import os
import pickle
import re
import struct
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.metadata_format import METADATA_KEY, ItemPlace, encode_metadata
from tests.support.dcp import Door
from tests.support.tensors import assert_same


class _Bomb:
    """Unpickled, makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def _archive(data: bytes) -> bytes:
    """What `torch.save` makes, around any pickle."""
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    writer.write_record("data.pkl", data, len(data))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    return stream.getvalue()


def _saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _pickles(target: Path) -> dict[str, bytes]:
    """Pickles that make `target`, each by other means."""
    argument = _text(str(target))
    return {
        **{f"protocol {version}": pickle.dumps(_Bomb(target), version) for version in range(6)},
        "stack global": b"\x80\x02" + _text("os") + _text("mkdir") + b"\x93" + argument + b"\x85R.",
        "inst": b"(S'" + str(target).encode() + b"'\nios\nmkdir\n.",
        "obj": b"(cos\nmkdir\n" + argument + b"o.",
        "after a good value": b"\x80\x02}q\x00(" + _text("a") + b"cos\nmkdir\n" + argument + b"\x85Ru.",
        "inside of what is allowed": pickle.dumps({"x": [1, (_Bomb(target),)]}, 2),
        "getattr": b"\x80\x02cbuiltins\ngetattr\ncos\nmkdir\n0" + b"cos\nmkdir\n" + argument + b"\x85R.",
        "eval": b"\x80\x02cbuiltins\neval\n" + _text(f"__import__('os').mkdir({str(target)!r})") + b"\x85R.",
        "old builtins": b"\x80\x02c__builtin__\neval\n" + _text(f"__import__('os').mkdir({str(target)!r})") + b"\x85R.",
        "a dotted name": b"\x80\x04cshutil\nos.mkdir\n" + argument + b"\x85R.",
        "a pickle in a pickle": b"\x80\x02ctorch.storage\n_load_from_bytes\n"
        + b"c_codecs\nencode\n"
        + _text(_archive(pickle.dumps(_Bomb(target), 2)).decode("latin1"))
        + _text("latin1")
        + b"\x86R\x85R.",
    }


def _script(target: Path) -> bytes:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(Module()), stream)
    return stream.getvalue()


def _bombs(target: Path) -> dict[str, bytes]:
    plain = pickle.dumps(_Bomb(target), 2)
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("archive/data.pkl", plain)
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(1, 2))
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("archive/data.pkl", plain)
    return {
        **{f"archive, {name}": _archive(data) for name, data in _pickles(target).items()},
        "torch.save": _saved(_Bomb(target)),
        "torch.save, legacy": _saved(_Bomb(target), _use_new_zipfile_serialization=False),
        "pickle": plain,
        "pickle before an archive": plain + _saved(1),
        "legacy before an archive": _saved(_Bomb(target), _use_new_zipfile_serialization=False) + _saved(1),
        "zip": zipped.getvalue(),
        "zip with two": twice.getvalue(),
        "script": _script(target),
        "truncated": _saved(_Bomb(target))[:-20],
        "nothing": b"",
    }


_REFUSED = r"UnsafeContentError|DamagedError"
# Torch asks twice for metadata, and then only quotes what was said.
_METADATA_REFUSED = r"metadata is not (acceptable|valid)"


def _crafted(
    door: Door,
    data: bytes,
    step: int = 1,
    *,
    as_tensor: bool = False,
    encoded: bytes | None = None,
) -> None:
    """A version whose every digest is right, with an item `x` of these bytes."""
    size = torch.Size([3])
    chunks = [ChunkStorageMetadata(torch.Size([0]), size)]
    properties = TensorProperties.create_from_tensor(torch.zeros(3))
    kind = TensorStorageMetadata(properties, size, chunks) if as_tensor else BytesStorageMetadata()
    index = MetadataIndex("x", torch.Size([0]) if as_tensor else None)
    made = Metadata({"x": kind}, planner_data={"x": ("x",)}, storage_data={index: ItemPlace(0, "x")})
    described = encode_metadata(made, None) if encoded is None else encoded
    items = [("x", data), (METADATA_KEY, described)]
    door.put(step, [("other", torch.ones(2))], items)


def _load(door: Door, state: dict[str, Any], step: int = 1, *, planner: Any = None, **reader: Any) -> dict[str, Any]:
    storage_reader = MemoryStorageReader(checkpoint_loader=door.loader, **reader)
    dcp.load(state, checkpoint_id=door.version(step), storage_reader=storage_reader, planner=planner)
    return state


def test_the_bombs_work(tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    for name, data in _pickles(tmp_path / "x").items():
        with contextlib.suppress(Exception):
            torch.load(io.BytesIO(_archive(data)), weights_only=False)
        assert (tmp_path / "x").is_dir(), name
        (tmp_path / "x").rmdir()


@pytest.mark.parametrize("where", ["item", "tensor", "metadata"])
def test_what_would_execute_is_refused_before(door: Door, tmp_path: Path, where: str) -> None:
    target = tmp_path / "executed"
    refused = _METADATA_REFUSED if where == "metadata" else _REFUSED
    for step, (name, data) in enumerate(_bombs(target).items(), 1):
        if where == "metadata":
            _crafted(door, _saved(1), step, encoded=_metadata(planner_data=base64.b64encode(data).decode()))
        else:
            _crafted(door, data, step, as_tensor=where == "tensor")
        with pytest.raises(CheckpointException) as raised:
            _load(door, {"x": torch.zeros(3) if where == "tensor" else None}, step)
        assert re.search(refused, str(raised.value)), name
        assert not target.exists(), name


def _metadata(**fields: Any) -> bytes:
    """Metadata of an item `x` that is no tensor, with other fields."""
    usual = Metadata({"x": BytesStorageMetadata()}, {"x": ("x",)}, {MetadataIndex("x"): ItemPlace(0, "x")})
    return json.dumps(json.loads(encode_metadata(usual)) | fields).encode()


PLACES: list[Any] = [
    None,
    [],
    "elsewhere",
    [["x"]],
    [["x", None, None, 0, "no such item"]],
    [["x", None, None, 7, "x"]],
    [["x", None, None, -1, "x"]],
    [["x", None, None, "../../0", "x"]],
    [["x", None, None, 0, 5]],
    [["x", None, None, 0, "other"]],
    [["x", None, None, 0, METADATA_KEY]],
]


def test_places_that_are_none_and_metadata_of_another_form_are_refused(door: Door) -> None:
    of_places = r"ml_flashpoint\.format\.errors\.\w+Error|metadata is not valid"
    cases = [(_metadata(places=places), of_places) for places in PLACES]
    cases += [(data, _METADATA_REFUSED) for data in (_saved(Metadata({})), b"5", b"null", b"[]", b"{}")]
    for step, (encoded, refused) in enumerate(cases, 1):
        _crafted(door, _saved(1), step, encoded=encoded)
        with pytest.raises(CheckpointException) as raised:
            _load(door, {"x": None}, step)
        assert re.search(refused, str(raised.value)), encoded


class _Progress:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Progress) and other.epoch == self.epoch

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class _Settings:
    rate: float


class _Phase(enum.Enum):
    WARMUP = 1
    MAIN = 2


_Pair = namedtuple("_Pair", "a b")


def _no_such_class(*arguments: Any) -> None:
    raise AssertionError


def test_dataclasses_and_other_plain_types_come_back(door: Door, mode: str) -> None:
    for step, value in enumerate((_Settings(0.5), _Phase.MAIN, _Pair(1, torch.ones(2)), np.float32(2)), 1):
        door.save_by(mode, {"x": value}, step)
        loaded = _load(door, {"x": None}, step)["x"]
        assert type(loaded) is type(value)
        assert_same(tuple(loaded), tuple(value)) if isinstance(value, tuple) else assert_same(loaded, value)


def test_types_of_the_users_own_need_to_be_allowed(make_door: Callable[..., Door], mode: str) -> None:
    value = _Progress(3)
    with pytest.raises(CheckpointException, match=rf"(?s)'x' holds .*{type(value).__qualname__}.*safe_globals"):
        make_door().save_by(mode, {"x": value}, 1)
    door = make_door(safe_globals=[type(value)])
    door.save_by(mode, {"x": value}, 1)
    with pytest.raises(CheckpointException, match=rf"(?s){type(value).__qualname__}.*safe_globals"):
        _load(door, {"x": None})
    with pytest.raises(CheckpointException, match="UnsafeContentError"):
        _load(door, {"x": None}, safe_globals=[_no_such_class])
    loaded = _load(door, {"x": None}, safe_globals=[type(value)])["x"]
    assert loaded == value
    assert type(_load(door, {"x": None}, trust_bytes=True)["x"]) is type(value)


def test_allowing_a_type_does_not_allow_others(door: Door, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    _crafted(door, _saved([_Progress(3), _Bomb(target)]))
    with pytest.raises(CheckpointException, match="UnsafeContentError"):
        _load(door, {"x": None}, safe_globals=[_Progress])
    assert not target.exists()


class _RawSavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return io.BytesIO(object)


def test_bytes_that_are_never_unpickled_need_trust_on_both_sides(make_door: Callable[..., Door], mode: str) -> None:
    state = {"raw": b"not even a pickle"}
    with pytest.raises(CheckpointException, match=r"(?s)item 'raw' .*trust_bytes=True"):
        make_door().save_by(mode, state, 1, planner=_RawSavePlanner())
    door = make_door(trust_bytes=True)
    door.save_by(mode, state, 1, planner=_RawSavePlanner())
    with pytest.raises(CheckpointException, match=r"(?s)UnsafeContentError.*trust_bytes"):
        _load(door, {"raw": None}, planner=_RawPlanner())
    assert _load(door, {"raw": None}, planner=_RawPlanner(), trust_bytes=True) == state


def test_a_stream_of_bytes_is_loaded_as_it_was_saved(door: Door, mode: str) -> None:
    door.save_by(mode, {"stream": io.BytesIO(b"some bytes"), "in a list": [io.BytesIO(b"more")]}, 1)
    loaded = _load(door, {"stream": None, "in a list": [None]})
    assert (loaded["stream"].getvalue(), loaded["in a list"][0].getvalue()) == (b"some bytes", b"more")


class _RawPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


class _ProgressPlanner(DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data={"x": _Progress(1)})


def test_metadata_of_planners_with_types_of_their_own(make_door: Callable[..., Door]) -> None:
    with pytest.raises(CheckpointException, match=r"(?s)planner's metadata.* holds .*_Progress.*safe_globals"):
        make_door().save({"x": 1}, 1, planner=_ProgressPlanner())
    door = make_door(safe_globals=[_Progress])
    door.save({"x": 1}, 1, planner=_ProgressPlanner())
    with pytest.raises(CheckpointException, match=r"(?s)_Progress.*safe_globals"):
        _load(door, {"x": None})
    assert _load(door, {"x": None}, safe_globals=[_Progress]) == {"x": 1}
