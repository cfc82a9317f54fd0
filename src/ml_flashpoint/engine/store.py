"""The job's store: keys and values that all ranks share, signed with the job's secret.

Rank 0 hosts a ``TCPStore`` of torch (https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore);
a job of one process has a ``HashStore``. A ``TCPStore`` serves whoever connects, so each value carries a keyed hash of
its key and its content. A value without the right hash is as good as none. Counts are not signed: they tell ranks no
more than when to look. Where a count is no number, the server ends the connection of each client that adds to it, so
counts are removed when a client has failed.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined, unused-ignore]

from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.server import reachable_host
from ml_flashpoint.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)

_SIGNATURE_BYTES = 16
_CLIENT_S = 5.0


class SignedStore:
    """A client of a store of torch whose values are signed, under a prefix; those of ``plain``, for counts, are not.
    Not thread-safe: a call waits behind another thread's."""

    def __init__(self, store: Store, prefix: str, secret: bytes) -> None:
        self.plain = PrefixStore(prefix, store)
        self._prefix, self._secret = prefix, secret
        self._has_reported = False

    def _signature(self, key: str, value: bytes) -> bytes:
        signed = b"%d %s/%s %s" % (len(key), self._prefix.encode(), key.encode(), value)
        return blake2b(signed, key=self._secret, digest_size=_SIGNATURE_BYTES).digest()

    def _checked(self, key: str, blob: bytes) -> bytes:
        value = blob[_SIGNATURE_BYTES:]
        if hmac.compare_digest(blob[:_SIGNATURE_BYTES], self._signature(key, value)):
            return value
        if blob and not self._has_reported:
            self._has_reported = True
            text = "the job's store has a value at %s/%s that is not signed by a rank of this job, and is ignored"
            _log.warning(text, self._prefix, key)
        return b""

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        content = value.encode() if isinstance(value, str) else value
        self.plain.set(key, self._signature(key, content) + content)  # type: ignore[arg-type, unused-ignore]

    def get(self, key: str) -> bytes:
        """Return a value; empty if there is none, or it is not signed."""
        return self._checked(key, self.plain.get(key)) if self.plain.check([key]) else b""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are all there, as `get` does."""
        return [self._checked(key, blob) for key, blob in zip(keys, self.plain.multi_get(list(keys)), strict=True)]

    def reserve(self, key: str) -> None:
        """Have a key there, with an empty value until one is written: for `multi_get`."""
        self.plain.compare_set(key, "", "")


class JobStore:
    """The store of a job, as one rank has it. Thread-safe. Made by `open_store`. ``address`` is that of rank 0's
    ``TCPStore``; None for a job of one process."""

    def __init__(self, address: tuple[str, int] | None, server: Store | None, secret: bytes) -> None:
        self.address = address
        self._server, self._secret = server, secret

    def connect(self, prefix: str) -> SignedStore:
        """Return a new client, whose keys are apart from those of other prefixes. It raises a `RuntimeError`, as its
        calls do, if rank 0 cannot be reached within a few seconds, or the store is closed."""
        if self.address is not None:
            client: Store | None = TCPStore(*self.address, None, False, timedelta(seconds=_CLIENT_S))
        else:
            client = self._server
        if client is None:
            raise RuntimeError("the job's store is closed")
        return SignedStore(client, prefix, self._secret)

    def close(self) -> None:
        """End the store on rank 0, once no rank needs it any more. Safe to call twice."""
        self._server = None


def open_store(ranks: RankGroup) -> JobStore:
    """Open the store of a job. Collective. Raise a `FlashpointError`, on all ranks, if a rank cannot host or reach
    it."""
    if ranks.world_size == 1:
        return JobStore(None, HashStore(), ranks.secret)

    unusable = partial(
        FlashpointError,
        rank=ranks.rank,
        node=ranks.node,
        hint="let the ranks' hosts connect to each other; FLASHPOINT_HOST names an address of rank 0's that they reach",
    )

    def host() -> TCPStore | None:
        if ranks.rank != 0:
            return None
        try:
            return TCPStore("localhost", 0, None, True, timedelta(seconds=_CLIENT_S), wait_for_workers=False)
        except RuntimeError as error:
            raise unusable(f"rank 0 cannot host the job's store: {error}") from error

    server = ranks.together(host, FlashpointError, "hosting the job's store")
    mine = json.dumps(["", 0] if server is None else [reachable_host(), server.port])
    name, port = json.loads(ranks.broadcast(mine.encode()))
    store = JobStore((name, port), server, ranks.secret)

    def reach() -> None:
        try:
            store.connect("open").plain.add("ranks", 1)
        except RuntimeError as error:
            raise unusable(f"the job's store at rank 0 cannot be reached, {name}:{port}: {error}") from error

    ranks.together(reach, FlashpointError, "reaching the job's store")
    return store
