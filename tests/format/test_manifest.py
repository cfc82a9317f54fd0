from __future__ import annotations

import itertools
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import (
    ManifestError,
    ObjectNotFoundError,
)
from ml_flashpoint.format.manifest import (
    MAX_RECORD_BYTES,
    Manifest,
    ObjectRecord,
    decode,
    encode,
    encode_record,
    read_manifest,
    write_manifest,
)
from ml_flashpoint.format.names import (
    MAX_RUN,
    MAX_STEP,
    MAX_WORLD_SIZE,
    SaveId,
    manifest_name,
    object_name,
    parse_manifest_name,
    parse_object_name,
)
from tests.support.forked import Child

RECORD = ObjectRecord(24, 4096, ("0123456789abcdef", "00000000000000ff"), 16)
MANIFEST = Manifest(SaveId(7, 5), 3, 8, "node-1", RECORD, {"kind": "dcp"})
NAME = "rank-00003-00000007.manifest"
ENCODED = (
    b'{"kind":"mlflashpoint-manifest-1","digest":"04e4a7c7aa99b1d1bafc3fa65df36f3d","content":'
    b'{"labels":{"kind":"dcp"},"node":"node-1","object":{"block_size":16,'
    b'"digests":["0123456789abcdef","00000000000000ff"],"file_size":4096,"size":24},'
    b'"rank":3,"run":7,"step":5,"world_size":8}}'
)


def committed(content: dict[str, Any]) -> bytes:
    """A manifest file of any content, with the right digest."""
    return encode_record("mlflashpoint-manifest-1", content)


def content(**changes: Any) -> dict[str, Any]:
    return json.loads(ENCODED)["content"] | changes


def record(**changes: Any) -> dict[str, Any]:
    return content()["object"] | changes


segments = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=40
).filter(lambda text: text not in (".", ".."))


@st.composite
def records(draw: st.DrawFn) -> ObjectRecord:
    block_size = draw(st.integers(1, 2**30))
    blocks = draw(st.integers(0, 5))
    size = 0 if blocks == 0 else (blocks - 1) * block_size + draw(st.integers(1, block_size))
    digest = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
    digests = draw(st.lists(digest, min_size=blocks, max_size=blocks))
    return ObjectRecord(size, size + draw(st.integers(0, 2**40)), tuple(digests), block_size)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    world_size = draw(st.integers(1, MAX_WORLD_SIZE))
    return Manifest(
        save=SaveId(draw(st.integers(0, MAX_RUN)), draw(st.integers(0, MAX_STEP))),
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        node=draw(segments),
        record=draw(records()),
        labels=draw(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4)),
    )


class TestNames:
    @given(st.integers(0, MAX_WORLD_SIZE - 1))
    def test_a_manifest_is_called_by_its_rank_and_save_id(self, rank: int) -> None:
        assert parse_manifest_name(manifest_name(rank, "0007-ab")) == (rank, "0007-ab")
        assert parse_object_name(object_name(rank, "0007-ab")) == (rank, "0007-ab")
        assert parse_object_name(manifest_name(rank, "0007-ab")) is None
        assert manifest_name(3, "00000007") == NAME
        assert object_name(3, "0007-ab") == "rank-00003-0007-ab.safetensors"

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "rank-3-a1.manifest",
            "rank-00003-00000007.manifest\n",
            ".rank-00003-00000007.manifest",
            "rank--0003-a1.manifest",
            "rank-\u0660\u0660\u0660\u0660\u0663-a1.manifest",
            f"rank-{MAX_WORLD_SIZE}-a1.manifest",
            "rank-00003-a1.safetensors",
        ],
    )
    def test_what_was_not_written_is_not_a_manifest(self, name: str) -> None:
        assert parse_manifest_name(name) is None


class TestEncoding:
    @given(manifests())
    def test_round_trip(self, manifest: Manifest) -> None:
        encoded = encode(manifest)
        assert decode(encoded) == manifest
        assert encode(decode(encoded)) == encoded

    def test_the_form_on_disk_does_not_drift(self) -> None:
        assert encode(MANIFEST) == ENCODED
        assert decode(ENCODED) == MANIFEST

    def test_every_flipped_bit_truncation_and_addition_is_detected(self) -> None:
        for position in range(len(ENCODED)):
            damaged = bytearray(ENCODED)
            for bit in range(8):
                damaged[position] = ENCODED[position] ^ (1 << bit)
                with pytest.raises(ManifestError):
                    decode(bytes(damaged))
            with pytest.raises(ManifestError):
                decode(ENCODED[:position])
        with pytest.raises(ManifestError):
            decode(ENCODED + b"}")

    @given(st.binary(max_size=200))
    @example(b"[]")
    @example(b"null")
    @example(b"{}")
    @example(b"[" * 100_000)
    @example(b'{"kind":"mlflashpoint-manifest-1","content":3}')
    @example(encode_record("another-kind", {"run": 1}))
    def test_any_bytes(self, data: bytes) -> None:
        with pytest.raises(ManifestError, match="/path"):
            decode(data, "/path")

    @pytest.mark.parametrize(
        "changed",
        [
            {},
            content(extra=1),
            {key: value for key, value in content().items() if key != "node"},
            content(rank="3"),
            content(rank=True),
            content(rank=8),
            content(rank=-1),
            content(step=-1),
            content(object=record(block_size=0)),
            content(world_size=10**30),
            content(run=10**12),
            content(step=2**63),
            content(node=".."),
            content(node="\ud800"),
            content(labels={"a": 1}),
            content(object=[]),
            content(object=record(size=-24)),
            content(object=record(size=5000)),
            content(object=record(file_size=23)),
            content(object=record(file_size=2**63)),
            content(object=record(block_size=2**30 + 1)),
            content(object=record(digests=[["0123456789abcdef"], "0123456789abcdef"])),
            content(object=record(digests=["0123456789abcdef"] * 3)),
            content(object=record(digests=["0123456789abcdef", "0123456789ABCDEF"])),
            content(object=record(digests=["0123456789abcdef", "0123456789abcdef\n"])),
            content(object=record(extra=0)),
        ],
    )
    def test_a_right_digest_is_not_trusted(self, changed: dict[str, Any]) -> None:
        with pytest.raises(ManifestError) as raised:
            decode(committed(changed), "/base/step-5_ckpt/rank-00003-00000007.manifest")
        assert "/base/step-5_ckpt/rank-00003-00000007.manifest" in str(raised.value)

    def test_the_place_must_agree(self) -> None:
        assert decode(ENCODED, "/base/step-5_ckpt/rank-00003-00000007.manifest") == MANIFEST
        assert decode(ENCODED, Path("/anywhere/rank-00003-00000007.manifest")) == MANIFEST
        for place in (
            "step-5_ckpt/rank-00004-00000007.manifest",
            "step-5_ckpt/rank-00003-00000008.manifest",
            "step-6_ckpt/rank-00003-00000007.manifest",
            "x",
        ):
            with pytest.raises(ManifestError, match="unlike"):
                decode(ENCODED, f"/base/{place}")


@pytest.fixture
def version(tmp_path: Path) -> Path:
    directory = tmp_path / MANIFEST.save.version
    directory.mkdir()
    return directory


def _write_for_ever(report: Any, version: Path) -> None:
    for number in itertools.count():
        write_manifest(version, replace(MANIFEST, labels={"number": str(number)}))
        if number == 5:
            report("writing")


class TestFiles:
    def test_write_and_read(self, version: Path) -> None:
        path = write_manifest(version, MANIFEST)
        assert path == version / NAME
        assert path.read_bytes() == ENCODED
        assert read_manifest(path) == read_manifest(str(path)) == MANIFEST
        assert list(version.iterdir()) == [path]
        again = replace(MANIFEST, labels={"again": "yes"})  # the same save replaces it, and another stands beside it
        assert read_manifest(write_manifest(version, again)) == again
        other = replace(MANIFEST, save=SaveId(8, 5))
        assert read_manifest(write_manifest(version, other)) == other
        assert len(list(version.iterdir())) == 2
        with pytest.raises(ObjectNotFoundError, match=r"rank-00004-00000007\.manifest"):
            read_manifest(version / "rank-00004-00000007.manifest")
        with pytest.raises(ManifestError, match="rank 3"):
            read_manifest(path.rename(version / "rank-00004-00000007.manifest"))

    @pytest.mark.parametrize("kind", ["directory", "fifo", "link", "oversized", "empty"])
    def test_reads_only_regular_files_of_bounded_size(self, version: Path, kind: str) -> None:
        path = version / NAME
        if kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            target = version / "elsewhere"
            target.write_bytes(ENCODED)
            path.symlink_to(target)
        else:
            path.touch()
            os.truncate(path, MAX_RECORD_BYTES + 1 if kind == "oversized" else 0)
        with pytest.raises(ManifestError, match=r"rank-00003-00000007\.manifest"):
            read_manifest(path)

    def test_a_write_cut_short_keeps_the_earlier_one(self, version: Path) -> None:
        path = write_manifest(version, MANIFEST)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                write_manifest(version, replace(MANIFEST, labels={"again": "yes"}))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert read_manifest(path) == MANIFEST
        assert list(version.iterdir()) == [path]

    def test_a_writer_killed_at_any_point_leaves_a_whole_one(self, version: Path) -> None:
        write_manifest(version, MANIFEST)
        for _ in range(3):
            with Child(_write_for_ever, version) as writer:
                writer.next_report("writing")
                writer.kill()
            assert read_manifest(version / NAME).rank == 3
