"""`HeldPart`: a committed part in a store, be it this rank's own or a copy of another's.

Owns nothing else: `rank_store` makes, keeps and drops them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.format.manifest import Manifest


@dataclass(slots=True)
class HeldPart:
    """A committed part that a store answers for.

    Attributes:
        arenas: arenas that it keeps in use. With a manifest, they are those of its objects, in order.
        manifest: ``None`` when it could not be read, or does not fit the arenas: the part is then only kept
            until it is pruned.
        names: files of its objects.
        pins: how many readers there are.
        loans: how many of another kind there are, who give way where an arena is needed and there is no room for one.
        doomed: to be dropped when the last reader is done.
    """

    version: str
    rank: int
    save_id: str
    arenas: list[Arena]
    manifest: Manifest | None
    pins: int = 0
    loans: int = 0
    doomed: bool = False
    names: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of its objects; 0 without a manifest."""
        return 0 if self.manifest is None else self.manifest.total_size
