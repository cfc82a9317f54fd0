"""Small fetches from one holder: a manifest, or some blocks of an object, checked before they are returned.

Owns those checks. Whole objects, with retries over several holders, are `transfer_client`'s.
"""

from __future__ import annotations

from ml_flashpoint.format.digest import block_count, verify_blocks
from ml_flashpoint.format.errors import ManifestError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, decode, parse_object_name
from ml_flashpoint.net.transfer_client import Holder, PeerConnection


def fetch_manifest(
    holder: Holder, secret: bytes, version: str, rank: int, save_id: str, *, deadline_s: float
) -> Manifest:
    """The manifest of a part, from a node that has it, checked to be that part's.

    Raises:
        FlashpointError: the holder does not give it, or gives something else (`ManifestError`).
    """
    with PeerConnection(holder.address, secret, node=holder.node, deadline_s=deadline_s) as peer:
        manifest = decode(peer.read_manifest(version, rank, save_id))
    if (manifest.version, manifest.rank, manifest.save_id) != (version, rank, save_id):
        raise ManifestError(
            f"asked for rank {rank} of {version}, got rank {manifest.rank} of {manifest.version}",
            node=holder.node,
        )
    if any(parse_object_name(record.name) != (rank, save_id) for record in manifest.objects):
        raise ManifestError("it names objects of another part", rank=rank, node=holder.node)
    return manifest


def fetch_blocks(
    holder: Holder,
    secret: bytes,
    version: str,
    record: ObjectRecord,
    first_block: int,
    into: memoryview,
    *,
    deadline_s: float,
) -> None:
    """Fill ``into`` with whole blocks of an object, from ``first_block`` on, and check them.

    Raises:
        DigestMismatchError: A block is not what the record says.
        FlashpointError: the holder does not give them.
    """
    size = record.block_size
    with PeerConnection(holder.address, secret, node=holder.node, deadline_s=deadline_s) as peer:
        peer.fetch(version, record.name, first_block * size, into)
    digests = record.digests[first_block : first_block + block_count(into.nbytes, size)]
    verify_blocks(into, digests, size, first_block=first_block, path=f"{holder.node}:{version}/{record.name}")
