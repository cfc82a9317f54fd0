"""Whether the parts in a folder are what their manifests say, by a process that shares no code with their writer.

Owns one helper process for each pytest worker, which is fed folders and answers with what is wrong in them. It reads
the format as docs/object-format.md has it, by `json`, `xxhash` and `safetensors` alone: an error that writer and
reader of the package share does not hide here. Run as a script, this module is that helper.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import xxhash
from safetensors import safe_open

_KIND = "mlflashpoint-manifest-1"


def problems_in(folder: Path, any_bytes: bool = False) -> list[str]:
    """What is wrong with any part below a folder. A part whose manifest goes away meanwhile is pruned: no problem.

    Args:
        any_bytes: Objects need not be safetensors files, whatever they are called.
    """
    found = []
    for manifest in sorted(folder.rglob("step-*_ckpt/rank-*.manifest")):
        try:
            wrong = _check(manifest, any_bytes)
        except Exception as error:
            wrong = [f"{manifest}: {type(error).__name__}: {error}"]
        if wrong and manifest.exists():
            found += wrong
    return found


def _check(path: Path, any_bytes: bool) -> list[str]:
    record = json.loads(path.read_bytes())
    content = record["content"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    if (record["kind"], record["digest"]) != (_KIND, xxhash.xxh3_128(canonical).hexdigest()):
        return [f"{path}: its digest does not fit the rest"]
    named = f"step-{content['step']}_ckpt/rank-{content['rank']:05d}-{content['run']:08d}.manifest"
    wrong = [] if str(path).endswith(f"/{named}") else [f"{path}: it is the manifest {named}"]
    return wrong + _check_object(path.with_suffix(".safetensors"), content["object"], any_bytes)


def _check_object(path: Path, record: dict[str, Any], any_bytes: bool) -> list[str]:
    size, block, digests = record["size"], record["block_size"], record["digests"]
    with open(path, "rb") as file:
        held = os.fstat(file.fileno()).st_size
        if held != record["file_size"] or size > held:
            return [f"{path}: {held} bytes, of which {size} count; the manifest says {record['file_size']}"]
        found = [xxhash.xxh3_64(file.read(min(block, size - at))).hexdigest() for at in range(0, size, block)]
    wrong = [index for index, (one, other) in enumerate(zip(found, digests, strict=False)) if one != other]
    if wrong or len(found) != len(digests):
        return [f"{path}: blocks {wrong} of {len(found)} (digests of {len(digests)}) are not what was committed"]
    if path.suffix == ".safetensors" and not any_bytes:
        with safe_open(path, "np") as opened:  # reads and checks the whole header
            opened.keys()
    return []


class PartChecker:
    """A helper process that checks folders. Starts when first asked, ends with this process."""

    def __init__(self) -> None:
        self._helper: subprocess.Popen[str] | None = None

    def problems(self, folder: Path, *, any_bytes: bool = False) -> list[str]:
        """See `problems_in`."""
        if not any(folder.rglob("step-*_ckpt/rank-*.manifest")):
            return []
        if self._helper is None or self._helper.poll() is not None:
            self._start()
        assert self._helper is not None
        _pipe(self._helper.stdin).write(json.dumps([str(folder), any_bytes]) + "\n")
        _pipe(self._helper.stdin).flush()
        answer = _pipe(self._helper.stdout).readline()
        if not answer:
            raise RuntimeError(f"the process that checks parts has ended with {self._helper.wait()}")
        problems: list[str] = json.loads(answer)
        return problems

    def _start(self) -> None:
        # In a session of its own: whatever a test does to its process group is not meant for it.
        self._helper = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._helper.kill)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def main() -> None:
    for line in sys.stdin:
        folder, any_bytes = json.loads(line)
        print(json.dumps(problems_in(Path(folder), any_bytes)), flush=True)


if __name__ == "__main__":
    main()
