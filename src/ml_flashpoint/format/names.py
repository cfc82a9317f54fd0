"""Names: absolute ids of containers, saves, and the files of parts. Values: no filesystem is looked at."""

from __future__ import annotations

import operator
import os
import re
from typing import NamedTuple, SupportsIndex

from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, InvalidNameError

MAX_SEGMENT_BYTES = 255
"""Longest segment in bytes of UTF-8: ``NAME_MAX``."""

MAX_STEP = 2**63 - 1
"""Largest step number."""

MAX_WORLD_SIZE = 2**24
"""Largest number of ranks in a job."""

MAX_RUN = 10**12 - 1
"""Highest number of a run. A name with a higher one is no name of a save: nobody can make the next run unreadable."""

RUN_PATTERN = "[0-9]{8,12}"
"""Regular expression of the number in names."""

_VERSION_CONTAINER = re.compile(r"step-(0|[1-9][0-9]{0,18})_ckpt")
_RUN = re.compile(RUN_PATTERN)
_SAVE_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
_PART_FILE = re.compile(rf"rank-([0-9]{{5,8}})-({_SAVE_ID.pattern})\.(manifest|safetensors)")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 80 else name[:80] + "...")


def validate_segment(name: str) -> str:
    """Return ``name`` if it can be one segment of an id, and so one file name inside its directory.

    Raises:
        InvalidNameError: ``name`` is not a string, is empty, ``.`` or ``..``, holds a slash or a NUL, cannot be
            encoded as UTF-8, or is longer than `MAX_SEGMENT_BYTES`.
    """
    if not isinstance(name, str):
        raise InvalidNameError(f"a name must be a string, not {type(name).__name__}")
    if name in ("", ".", ".."):
        raise InvalidNameError(f"a name must not be {_shown(name)}")
    if "/" in name or "\0" in name:
        raise InvalidNameError(f"a name must not hold a slash or a NUL: {_shown(name)}")
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise InvalidNameError(f"a name must be encodable as UTF-8: {_shown(name)}") from None
    if len(encoded) > MAX_SEGMENT_BYTES:
        raise InvalidNameError(f"a name must have at most {MAX_SEGMENT_BYTES} bytes: {_shown(name)}")
    return name


class CheckpointContainerId(str):
    """Name of a directory of a checkpoint: a job's base container, a version, or anything between. A `str`.

    Args:
        string: absolute path. Repeated and trailing slashes are dropped.

    Raises:
        InvalidNameError: the path is relative, is the root, or has a segment that `validate_segment` refuses.
    """

    __slots__ = ()

    def __new__(cls, string: str | os.PathLike[str]) -> CheckpointContainerId:
        """Return the id of a path."""
        raw = os.fspath(string)
        if not isinstance(raw, str):
            raise InvalidNameError("a checkpoint path must be text, not bytes")
        if not raw.startswith("/"):
            raise InvalidNameError(f"a checkpoint path must be absolute: {_shown(raw)}")
        segments = [validate_segment(segment) for segment in raw.split("/") if segment]
        if not segments:
            raise InvalidNameError("a checkpoint path must not be the root directory")
        return super().__new__(cls, "/" + "/".join(segments))

    @property
    def path(self) -> str:
        """The normalised absolute path."""
        return str(self)

    data = path

    @property
    def name(self) -> str:
        """The last segment."""
        return os.path.basename(self)

    def get_parent(self, levels_up: int = 1) -> CheckpointContainerId | None:
        """Return the container ``levels_up`` levels above, ``None`` where that is the root directory or above it.

        Raises:
            InvalidArgumentError: ``levels_up`` is not an integer of at least 1.
        """
        if isinstance(levels_up, bool) or not isinstance(levels_up, int) or levels_up < 1:
            raise InvalidArgumentError("must be an integer of at least 1", argument="levels_up", value=levels_up)
        above = "/".join(self.split("/")[:-levels_up])
        return CheckpointContainerId(above) if above else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @staticmethod
    def create_child(parent_container_id: str | os.PathLike[str], child_id: str, *names: str) -> CheckpointContainerId:
        """Return the container ``child_id`` below ``parent_container_id``; with ``names``, one further below it.

        Raises:
            InvalidNameError: the parent is not valid, or a name is no segment.
        """
        above = CheckpointContainerId(parent_container_id)
        return CheckpointContainerId("/".join([above, *map(validate_segment, (child_id, *names))]))

    @staticmethod
    def of_version(path: object) -> CheckpointContainerId | None:
        """Return the id of a path if that names a version, ``None`` for anything else."""
        try:
            version = CheckpointContainerId(path)  # type: ignore[arg-type]
        except (FlashpointError, TypeError):
            return None
        return None if version.step is None else version

    @staticmethod
    def format_version_container(step: SupportsIndex) -> str:
        """Return the directory name of the version of a step: ``step-<n>_ckpt``.

        Raises:
            InvalidArgumentError: ``step`` is not an integer from 0 to `MAX_STEP`.
        """
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = -1
        if not 0 <= number <= MAX_STEP:
            raise InvalidArgumentError(f"a step must be an integer from 0 to {MAX_STEP}", argument="step", value=step)
        return f"step-{number}_ckpt"

    @staticmethod
    def parse_version_container(name: str) -> int | None:
        """Return the step of a name that `format_version_container` gives, None for any other name."""
        match = _VERSION_CONTAINER.fullmatch(name)
        return int(match[1]) if match and int(match[1]) <= MAX_STEP else None

    parse_version_container_step = parse_version_container

    @property
    def parent(self) -> CheckpointContainerId:
        """The container above this one. Raises an `InvalidNameError` if that is the root directory."""
        return CheckpointContainerId(os.path.dirname(self))

    @property
    def step(self) -> int | None:
        """The step of a version; None if the last segment is not the name of one."""
        return self.parse_version_container(self.name)


class SaveId(NamedTuple):
    """Name of a save. Saves of a later run compare greater, and within a run those of a later step.

    Attributes:
        run: number of the run, from 1. Run 0 is older than every run.
        step: training step.
    """

    run: int
    step: int

    @property
    def version(self) -> str:
        """Directory name of the version, ``step-<step>_ckpt``."""
        return f"step-{self.step}_ckpt"

    @property
    def text(self) -> str:
        """The run as manifests and file names spell it: at least 8 digits."""
        return f"{self.run:08d}"

    @staticmethod
    def parse(version: str, text: str) -> SaveId | None:
        """Return the save of a version's directory name and a save id, or None if there is no such save."""
        step = CheckpointContainerId.parse_version_container(version)
        if step is None or not _RUN.fullmatch(text):
            return None
        save = SaveId(int(text), step)
        return save if save.text == text else None


def manifest_name(rank: int, save_id: str) -> str:
    """Return the file name of the manifest of a rank's part: ``rank-00003-<save id>.manifest``."""
    return f"rank-{rank:05d}-{save_id}.manifest"


def parse_manifest_name(name: str) -> tuple[int, str] | None:
    """Return rank and save id from a file name of `manifest_name`, or None for any other."""
    return _parse_part_file(name, "manifest")


def object_name(rank: int, save_id: str) -> str:
    """Return the file name of a rank's object: ``rank-00003-<save id>.safetensors``."""
    return f"rank-{rank:05d}-{save_id}.safetensors"


def parse_object_name(name: str) -> tuple[int, str] | None:
    """Return rank and save id from a file name of `object_name`, or None for any other."""
    return _parse_part_file(name, "safetensors")


def _parse_part_file(name: str, kind: str) -> tuple[int, str] | None:
    match = _PART_FILE.fullmatch(name)
    if match is None or match[3] != kind:
        return None
    rank = int(match[1])
    return (rank, match[2]) if rank < MAX_WORLD_SIZE and match[1] == f"{rank:05d}" else None
