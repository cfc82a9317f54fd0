"""Absolute, hierarchical names of checkpoints and of the objects in them.

Owns what a valid name is and how a version's directory is called. Names are values: nothing here looks at a
filesystem, so a name says nothing about whether something exists there, and symbolic links are not resolved.
"""

from __future__ import annotations

import operator
import os
import re
from typing import SupportsIndex, TypeVar

from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, InvalidNameError

MAX_SEGMENT_BYTES = 255
"""Longest segment in bytes of UTF-8: `NAME_MAX` of the filesystems that checkpoints live on."""

MAX_STEP = 2**63 - 1
"""Largest step number: steps are agreed on as signed 64-bit integers in collectives."""

_VERSION_CONTAINER = re.compile(r"step-(0|[1-9][0-9]{0,18})_ckpt")
_SHOWN_CHARACTERS = 80

_Id = TypeVar("_Id", bound="_AbsoluteId")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "...")


def validate_segment(name: str) -> str:
    """Return ``name`` if it can be one segment of an id, and so one file name inside its directory.

    Names that arrive from a peer or from a manifest go through here before they are joined to a path.

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
        raise InvalidNameError(
            f"a name must have at most {MAX_SEGMENT_BYTES} bytes, not {len(encoded)}: {_shown(name)}"
        )
    return name


def is_segment(name: object) -> bool:
    """Return True if `validate_segment` takes a name."""
    try:
        validate_segment(name)  # type: ignore[arg-type]
    except InvalidNameError:
        return False
    return True


def _split_absolute(path: str | os.PathLike[str]) -> tuple[str, ...]:
    raw = os.fspath(path)
    if not isinstance(raw, str):
        raise InvalidNameError("a checkpoint path must be text, not bytes")
    if not raw.startswith("/"):
        raise InvalidNameError(f"a checkpoint path must be absolute: {_shown(raw)}")
    segments = tuple(validate_segment(segment) for segment in raw.split("/") if segment)
    if not segments:
        raise InvalidNameError("a checkpoint path must not be the root directory")
    return segments


class _AbsoluteId(str):
    """A validated, normalised absolute path: what both kinds of id share."""

    __slots__ = ()

    def __new__(cls: type[_Id], string: str | os.PathLike[str]) -> _Id:
        """Return the id of a path. Pickles come through here, too."""
        return super().__new__(cls, "/" + "/".join(_split_absolute(string)))

    @property
    def path(self) -> str:
        """The normalised absolute path."""
        return str(self)

    @property
    def data(self) -> str:
        """The same as :attr:`path`."""
        return str(self)

    @property
    def segments(self) -> tuple[str, ...]:
        """The names on the way from the root, at least one."""
        return tuple(self.split("/")[1:])

    @property
    def name(self) -> str:
        """The last segment."""
        return self.segments[-1]

    def get_parent(self, levels_up: int = 1) -> CheckpointContainerId | None:
        """Return the container ``levels_up`` levels above, ``None`` where that is the root directory or above it.

        Raises:
            InvalidArgumentError: ``levels_up`` is not an integer of at least 1.
        """
        if isinstance(levels_up, bool) or not isinstance(levels_up, int) or levels_up < 1:
            raise InvalidArgumentError("must be an integer of at least 1", argument="levels_up", value=levels_up)
        above = self.segments[:-levels_up]
        return CheckpointContainerId("/" + "/".join(above)) if above else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"


class CheckpointContainerId(_AbsoluteId):
    """Name of a directory of a checkpoint: a job's base container, a version, or anything between.

    The id is its normalised path, a `str`.

    Args:
        string: absolute path. Repeated and trailing slashes are dropped.

    Raises:
        InvalidNameError: the path is relative, is the root, or has a segment that `validate_segment` refuses.
    """

    __slots__ = ()

    @staticmethod
    def create_child(parent_container_id: str | os.PathLike[str], child_id: str, *names: str) -> CheckpointContainerId:
        """Return the container ``child_id`` below ``parent_container_id``; with ``names``, one further below it.

        Each name is one segment: nothing in it can lead out of the parent.

        Raises:
            InvalidNameError: the parent or a name is not valid.
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
        """Return the step of a version's directory name, or ``None`` if ``name`` is not exactly such a name.

        Strict: what `format_version_container` would not have written is not a version.
        """
        match = _VERSION_CONTAINER.fullmatch(name)
        if match is None:
            return None
        step = int(match[1])
        return step if step <= MAX_STEP else None

    parse_version_container_step = parse_version_container
    """The name of :meth:`parse_version_container` in google/ml-flashpoint."""

    @property
    def parent(self) -> CheckpointContainerId:
        """The container above this one.

        Raises:
            InvalidNameError: there is none, since the root directory is not a container.
        """
        return CheckpointContainerId("/" + "/".join(self.segments[:-1]))

    @property
    def step(self) -> int | None:
        """The step, if the last segment is the name of a version."""
        return self.parse_version_container(self.name)


class CheckpointObjectId(_AbsoluteId):
    """Name of one object (file) in a container.

    The id is its normalised path, a `str`.

    Args:
        string: absolute path of at least two segments. Repeated and trailing slashes are dropped.

    Raises:
        InvalidNameError: the path is relative, is the root or directly below it, or has a segment that
            `validate_segment` refuses.
    """

    __slots__ = ()

    def __new__(cls, string: str | os.PathLike[str]) -> CheckpointObjectId:
        """Return the id of a path. Raise an `InvalidNameError` if there is none."""
        made = super().__new__(cls, string)
        if len(made.segments) < 2:
            raise InvalidNameError(f"an object must lie in a container: {_shown(made)}")
        return made

    @staticmethod
    def from_container(parent_container_id: str | os.PathLike[str], object_name: str) -> CheckpointObjectId:
        """Return the object called ``object_name`` in a container.

        Raises:
            InvalidNameError: the container or the name is not valid.
        """
        above = CheckpointContainerId(parent_container_id)
        return CheckpointObjectId(f"{above.path}/{validate_segment(object_name)}")

    create = from_container
    """The shorter name of :meth:`from_container`."""

    @property
    def container(self) -> CheckpointContainerId:
        """The container that the object lies in."""
        return CheckpointContainerId("/" + "/".join(self.segments[:-1]))
