"""Stand-ins for the parts of the engine that are not there yet. Temporary."""

from __future__ import annotations

from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore

from ml_flashpoint.engine.rounds import Verdict
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.lineage import mark_begun, newest_begun, next_run, read_records, write_record


class JobStore:
    def __init__(self, ranks: Any) -> None:
        self._store: Any = None
        self._address = ("", 0)
        if ranks.world_size == 1:
            self._store = HashStore()
            return
        if ranks.rank == 0:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = 0 if self._store is None else self._store.port
        self._address = ("127.0.0.1", int(ranks.broadcast(str(port).encode())))

    def connect(self, prefix: str) -> Any:
        if not self._address[1]:
            return PrefixStore(prefix, self._store)
        return PrefixStore(prefix, TCPStore(*self._address, is_master=False, wait_for_workers=False))

    def close(self) -> None:
        self._store = None


def open_store(ranks: Any) -> JobStore:
    return JobStore(ranks)


class Recovery:
    report = None

    def __init__(self, ranks: Any, container: Any, keep: Any, **options: Any) -> None:
        self.ranks, self.container, self.keep = ranks, container, keep

    def record(self, chosen: Any) -> tuple[int, Verdict]:
        found = self.container.list_versions()
        record = next_run(read_records(self.container), found, chosen and chosen.save)
        if self.ranks.is_node_leader:
            write_record(self.container, record)
            mark_begun(self.container, record.run)
        self.ranks.all_ok(True)
        verified = () if chosen is None else (chosen.save,)
        return record.run, Verdict(0, verified, SaveId(record.run, 0))

    def any_versions(self) -> bool:
        record = newest_begun(read_records(self.container))
        mine = record is not None and any(record.has(save) for save in self.container.list_versions())
        return not self.ranks.all_ok(not mine)

    def find(self, wanted: Any, *, excluded: Any, retained: Any) -> Any:
        record = newest_begun(read_records(self.container))
        found = [s for s in self.container.list_versions() if record is not None and record.has(s)]
        return type("Found", (), {"save": max(found)}) if found else None

    def close(self) -> None: ...
