"""The check that ends every test with base containers: what it finds, and that sound parts are none of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ml_flashpoint import Flashpoint
from tests.support.part_checker import PartChecker

pytestmark = pytest.mark.damages_on_purpose


@pytest.fixture(scope="module")
def checker() -> PartChecker:
    return PartChecker()


@pytest.fixture
def version(tmpfs: Path) -> Path:
    with Flashpoint(tmpfs / "job", strict=True, handle_sigterm=False) as fp:
        fp.track(model=torch.nn.Linear(40, 30)).save(3)
        assert fp.wait()
    return tmpfs / "job" / "step-3_ckpt"


def test_sound_parts_and_empty_folders_are_no_problem(checker: PartChecker, version: Path, tmp_path: Path) -> None:
    assert checker.problems(version.parent) == []
    assert checker.problems(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "at", "what"),
    [
        ("safetensors", 5000, r"blocks \[.*\] .* are not what was committed"),
        ("safetensors", 3, "are not what was committed"),
        ("manifest", 60, "digest does not fit"),
        ("manifest", 20, "digest does not fit"),
    ],
)
def test_a_flipped_byte_is_found(checker: PartChecker, version: Path, kind: str, at: int, what: str) -> None:
    (path,) = version.glob(f"rank-*.{kind}")
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    (problem,) = checker.problems(version.parent)
    assert re.search(what, problem)
    assert str(path) in problem


def test_what_is_cut_missing_or_elsewhere_is_found(checker: PartChecker, version: Path) -> None:
    (path,) = version.glob("rank-*.safetensors")
    data = path.read_bytes()
    with open(path, "r+b") as file:
        file.truncate(len(data) // 2)
    assert "the manifest says" in checker.problems(version.parent)[0]
    path.unlink()
    assert "FileNotFoundError" in checker.problems(version.parent)[0]
    path.write_bytes(data)
    assert checker.problems(version.parent) == []
    version.rename(version.parent / "step-4_ckpt")
    assert "it is the manifest step-3_ckpt" in checker.problems(version.parent)[0]
