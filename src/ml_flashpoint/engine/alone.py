"""Stand-ins for the parts of the engine that are not there yet. Temporary."""

from __future__ import annotations

from typing import Any

from torch.distributed import HashStore, PrefixStore

from ml_flashpoint.engine.rounds import Verdict
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.lineage import mark_begun, newest_begun, next_run, read_records, write_record


class JobStore:
    def __init__(self) -> None:
        self._store = HashStore()

    def connect(self, prefix: str) -> Any:
        return PrefixStore(prefix, self._store)

    def close(self) -> None: ...


def open_store(ranks: Any) -> JobStore:
    return JobStore()


class Copies:
    def __init__(self, *args: Any, **options: Any) -> None: ...
    def serve(self, *args: Any) -> None: ...
    def push(self, *args: Any) -> None: ...
    def close(self) -> None: ...


class Recovery:
    report = None

    def __init__(self, ranks: Any, container: Any, keep: Any, **options: Any) -> None:
        self.ranks, self.container, self.keep = ranks, container, keep

    def record(self, chosen: Any) -> tuple[int, Verdict]:
        found = self.container.list_versions()
        record = next_run(read_records(self.container), found, chosen and chosen.save)
        write_record(self.container, record)
        mark_begun(self.container, record.run)
        verified = () if chosen is None else (chosen.save,)
        return record.run, Verdict(0, verified, SaveId(record.run, 0))

    def any_versions(self) -> bool:
        record = newest_begun(read_records(self.container))
        return record is not None and any(record.has(save) for save in self.container.list_versions())

    def find(self, wanted: Any, *, excluded: Any, retained: Any) -> Any:
        record = newest_begun(read_records(self.container))
        found = [s for s in self.container.list_versions() if record is not None and record.has(s)]
        return type("Found", (), {"save": max(found)}) if found else None

    def close(self) -> None: ...
