"""Every byte of a committed part, flipped or cut off: noticed, named, and the older version loads bit-equal."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from ml_flashpoint.format.manifest import read_manifest
from tests.faults.common import SCALE, part_files
from tests.support.forked import Child, ChildError, call
from tests.workers import fault_engine as engine

Damages = list[tuple[str, int, int]]


@pytest.fixture
def base(tmpfs: Path) -> Path:
    """A base container with whole versions of steps 1 and 2."""
    call(engine.save_steps, str(tmpfs / "job"), "tiny", [1, 2], 5)
    return tmpfs / "job"


def used_bytes(path: Path) -> int:
    """Bytes of an object that its manifest counts."""
    return read_manifest(path.with_suffix(".manifest")).record.size


def places(path: Path, stride: int = 1) -> list[int]:
    """Bytes of an object: those of the header's text and of the data, and some of the blanks between them."""
    header = path.read_bytes()[: used_bytes(path)]
    (data_start,) = struct.unpack("<Q", header[:8])
    blanks = range(header.rindex(b"}", 8, 8 + data_start) + 2, data_start)
    sparse = max(1, round(25 / SCALE))
    return [at for at in range(len(header)) if at not in blanks or at % sparse == 0][:: max(1, round(stride / SCALE))]


def load_each(base: Path, file: str, damages: Damages) -> None:
    # Not all in one process, which has a deadline: a load takes ten milliseconds, and far more on a busy machine.
    results = []
    for at in range(0, len(damages), 100):
        results += call(engine.load_damaged, str(base), "tiny", file, damages[at : at + 100])
    assert len(results) == len(damages) > 0
    wrong = [result for result in results if result[2:] != ((1, 5), True)]
    assert not wrong, f"{len(wrong)} of {len(results)}: {wrong[:5]}"
    assert call(engine.load, str(base), "tiny") == (2, 5)


def test_a_sound_part_is_loaded(base: Path) -> None:
    assert call(engine.load, str(base), "tiny") == (2, 5)


@pytest.mark.slow
@pytest.mark.timeout(600 * max(1, SCALE))
def test_every_byte_of_an_object_flipped(base: Path, rng: random.Random) -> None:
    file, _ = part_files(base, 2)
    load_each(base, file, [("flip", at, rng.randrange(1, 256)) for at in places(base / file)])


@pytest.mark.slow
@pytest.mark.timeout(600 * max(1, SCALE))
def test_an_object_cut_off_at_every_byte(base: Path) -> None:
    file, _ = part_files(base, 2)
    used = used_bytes(base / file)
    load_each(base, file, [("cut", at, 0) for at in (*places(base / file, 2), 4096, used - 1)])


@pytest.mark.slow
@pytest.mark.timeout(600 * max(1, SCALE))
def test_every_byte_of_a_manifest_flipped_or_cut_off(base: Path, rng: random.Random) -> None:
    _, file = part_files(base, 2)
    length = (base / file).stat().st_size
    load_each(base, file, [("flip", at, rng.randrange(1, 256)) for at in range(length)])
    load_each(base, file, [("cut", at, 0) for at in range(length)])


def test_bytes_that_no_object_uses_do_not_matter(base: Path, rng: random.Random) -> None:
    file, _ = part_files(base, 2)
    used, length = used_bytes(base / file), (base / file).stat().st_size
    damages = [("flip", rng.randrange(used, length), 1) for _ in range(20)] + [("flip", used, 255)]
    results = call(engine.load_damaged, str(base), "tiny", file, damages)
    assert {result[2:] for result in results} == {((2, 5), False)}


@pytest.mark.damages_on_purpose
def test_nothing_sound_is_an_error_that_names_the_files(base: Path) -> None:
    files = [part_files(base, step)[1] for step in (1, 2)]
    for step in (1, 2):
        for file in part_files(base, step):
            (base / file).write_bytes(b"nothing of use")
    with (
        Child(engine.load, str(base), "tiny") as child,
        pytest.raises(ChildError, match="NothingLoadableError") as found,
    ):
        child.result()
    assert all(str(base / file) in str(found.value) for file in files)
