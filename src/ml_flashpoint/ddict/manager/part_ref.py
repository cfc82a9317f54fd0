"""The names of the parts of a dictionary's managers."""

from __future__ import annotations

from typing import NamedTuple

from ml_flashpoint.ddict.options import check_checkpoint_id
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.manifest import Manifest, object_name
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.slot import PAGE


class PartRef(NamedTuple):
    """Names a part of this manager."""

    name: str  # its number, as `SaveId.text`; of what is persisted, the name of the item
    step: int  # checkpoint that it was sealed in

    @property
    def save(self) -> SaveId:
        """What it is called in a base container. Raises `InvalidArgumentError`: this is no part in one."""
        save = SaveId(int(self.name) if self.name.isascii() and self.name.isdecimal() else 0, self.step)
        if save.text != self.name:
            raise InvalidArgumentError("not the name of a part", argument="name", value=self.name)
        return save


def part_ref(name: object, step: object) -> PartRef:
    """A reference that somebody else gave. Raises `InvalidArgumentError`, `InvalidNameError`: it names no part."""
    if not isinstance(name, str):
        raise InvalidArgumentError("not the name of a part", argument="name", value=name)
    object_name(0, name)  # refuses what cannot be part of a file's name
    return PartRef(name, check_checkpoint_id(step, "step"))


def is_part(manifest: Manifest) -> bool:
    """Whether the manifest is of a part of a dictionary: a snapshot, or a large value, that fills a slot."""
    objects = [(record.name, record.file_size % PAGE) for record in manifest.objects]
    return SaveId.of(manifest) is not None and objects == [(object_name(manifest.rank, manifest.save_id), 0)]
