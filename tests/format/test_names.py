"""Ids: what is a name, what is not, and that nothing leads out of a container."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import InvalidArgumentError, InvalidNameError
from ml_flashpoint.format.names import (
    MAX_SEGMENT_BYTES,
    MAX_STEP,
    CheckpointContainerId,
    validate_segment,
)

BASE = CheckpointContainerId("/tmp/mlf-jobs/job-145")

# Lone surrogates are left out: they have no UTF-8 form.
segments = (
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60)
    .filter(lambda name: name not in (".", ".."))
    .filter(lambda name: len(name.encode()) <= MAX_SEGMENT_BYTES)
)
paths = st.lists(segments, min_size=1, max_size=5).map(lambda names: "/" + "/".join(names))
steps = st.integers(0, MAX_STEP)

BAD_SEGMENTS = ["", ".", "..", "/", "a/b", "../a", "a/..", "/etc", "a\0b", "\0", "\udc80", "x" * 256, "é" * 128]


def test_bad_segments_are_refused_everywhere() -> None:
    for name in BAD_SEGMENTS:
        with pytest.raises(InvalidNameError):
            validate_segment(name)
        for names in ([name], ["fine", name]):
            with pytest.raises(InvalidNameError):
                CheckpointContainerId.create_child(BASE, *names)


def test_names_are_text_and_shown_short() -> None:
    for odd in ("a", "...", "..a", " ", "a b", "step-5_ckpt", "é", "x" * 255, "-", "~"):
        assert validate_segment(odd) == odd
    for wrong in (None, 5, b"bytes", Path("a")):
        with pytest.raises(InvalidNameError):
            validate_segment(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidNameError) as caught:
        validate_segment("\x1b[31m\n" + "x" * 1_000_000)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_bad_paths_are_refused() -> None:
    for path in ("", "a", "a/b", "./a", "../a", "~/a", "/", "///", "/a/../b", "/a/./b", "/..", "/a\0", " /a", b"/a"):
        with pytest.raises(InvalidNameError):
            CheckpointContainerId(path)  # type: ignore[arg-type]
    assert CheckpointContainerId("//a///b//").path == "/a/b"


def test_parts_of_a_container() -> None:
    for parent in (BASE, BASE.path, BASE.path + "/", Path(BASE.path)):
        version = CheckpointContainerId.create_child(parent, CheckpointContainerId.format_version_container(7))
        assert type(version) is CheckpointContainerId
        assert version.path == str(version) == os.fspath(version) == "/tmp/mlf-jobs/job-145/step-7_ckpt"
    assert version.name == "step-7_ckpt"
    assert version.parent == BASE
    assert (version.step, BASE.step) == (7, None)
    assert repr(BASE) == "CheckpointContainerId('/tmp/mlf-jobs/job-145')"
    with pytest.raises(InvalidNameError):
        _ = CheckpointContainerId("/a").parent


def test_ids_are_immutable() -> None:
    for name in ("path", "name", "new"):
        with pytest.raises(AttributeError):
            setattr(BASE, name, "/b")
    with pytest.raises(AttributeError):
        del BASE.path  # type: ignore[misc]
    assert BASE.path == "/tmp/mlf-jobs/job-145"


def test_an_id_is_its_string_wherever_it_is_compared() -> None:
    container = CheckpointContainerId("/a/b/")
    assert container == "/a/b" == container.data
    assert container != "/a/b/"
    assert container not in ("/a", b"/a/b", Path("/a/b"), None)
    assert {container, "/a/b"} == {"/a/b"}
    assert {container: 1}["/a/b"] == {"/a/b": 1}[container] == 1


def test_the_names_of_google_ml_flashpoint() -> None:
    version = CheckpointContainerId.create_child(parent_container_id=BASE, child_id="step-7_ckpt")
    assert version == CheckpointContainerId(string=f"{BASE}/step-7_ckpt")
    assert CheckpointContainerId.parse_version_container_step(name=version.name) == 7
    assert CheckpointContainerId.parse_version_container_step(name="step-07_ckpt") is None
    assert CheckpointContainerId.format_version_container(step=7) == "step-7_ckpt"
    assert version.get_parent() == version.parent == BASE
    assert version.get_parent(levels_up=3) == "/tmp"
    assert version.get_parent(4) is version.get_parent(99) is None
    for levels in (0, -1, True, 1.0):
        with pytest.raises(InvalidArgumentError, match="levels_up"):
            version.get_parent(levels)  # type: ignore[arg-type]


def test_what_is_not_exactly_a_version_is_none() -> None:
    forged = ["step-_ckpt", "step-01_ckpt", "step--1_ckpt", "step-1_ckpt\n", "step-1_ckpt.tmp", "Step-1_ckpt", ""]
    forged += ["step-1_0_ckpt", "step-\u0661_ckpt", "a/step-1_ckpt", f"step-{MAX_STEP + 1}_ckpt"]
    for name in (*forged, f"step-{'9' * 100_000}_ckpt"):
        assert CheckpointContainerId.parse_version_container(name) is None


def test_steps_that_are_not_steps_are_refused() -> None:
    for step in (-1, True, False, 1.0, "1", None, MAX_STEP + 1):
        with pytest.raises(InvalidArgumentError, match="step"):
            CheckpointContainerId.format_version_container(step)  # type: ignore[arg-type]
    assert CheckpointContainerId.format_version_container(np.int64(12)) == "step-12_ckpt"


@given(steps)
@example(0)
@example(MAX_STEP)
def test_version_names_round_trip(step: int) -> None:
    name = CheckpointContainerId.format_version_container(step)
    assert CheckpointContainerId.parse_version_container(name) == step
    assert CheckpointContainerId.create_child(BASE, name).step == step


@given(st.text() | st.from_regex(r"step-[0-9]*_ckpt"))
def test_a_parsed_version_is_spelled_as_it_is_written(name: str) -> None:
    step = CheckpointContainerId.parse_version_container(name)
    assert step is None or CheckpointContainerId.format_version_container(step) == name


@given(paths)
def test_ids_round_trip(path: str) -> None:
    container = CheckpointContainerId(path)
    assert container.path == path
    assert container == CheckpointContainerId(str(container)) == CheckpointContainerId(Path(path))
    for again in (pickle.loads(pickle.dumps(container)), copy.copy(container), copy.deepcopy(container)):
        assert type(again) is CheckpointContainerId
        assert again == container
        assert hash(again) == hash(container)


@given(st.text(alphabet="a./\0é~\\ %") | st.text())
def test_no_path_is_accepted_that_means_another_one(text: str) -> None:
    try:
        container = CheckpointContainerId(text)
    except InvalidNameError:
        return
    assert os.path.normpath(container.path) == container.path
    assert PurePosixPath(container.path).is_absolute()
    assert os.path.normpath(text).replace("//", "/") == container.path


@given(paths, st.lists(st.text(alphabet="a./\0é~\\ ") | st.text(), min_size=1, max_size=3))
def test_no_child_escapes_its_parent(parent: str, names: list[str]) -> None:
    try:
        child = CheckpointContainerId.create_child(parent, *names)
    except InvalidNameError:
        return
    assert os.path.normpath(child.path) == child.path
    assert os.path.commonpath([parent, child.path]) == parent
    assert child.count("/") == CheckpointContainerId(parent).count("/") + len(names)


@given(st.text(min_size=1))
def test_a_forged_pickle_is_validated(text: str) -> None:
    data = pickle.dumps(CheckpointContainerId("/harmless"), protocol=2)
    assume(not text.startswith("/"))
    forged = data.replace(pickle.dumps("/harmless", 2)[2:-3], pickle.dumps(text, 2)[2:-3])
    assert forged != data
    with pytest.raises(InvalidNameError):
        pickle.loads(forged)
