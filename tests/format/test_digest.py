from __future__ import annotations

import gc
import mmap
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.digest import (
    BLOCK_SIZE,
    BlockDigester,
    block_count,
    digest_block,
    is_digest,
    verify_blocks,
)
from ml_flashpoint.format.errors import DigestMismatchError

SMALL = 64


def digests_of(data: bytes, block_size: int = SMALL) -> tuple[str, ...]:
    return tuple(digest_block(data[begin : begin + block_size]) for begin in range(0, len(data), block_size))


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A size, and ranges that cover some of it once, in any order."""
    size = draw(st.integers(0, 600))
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=12)))
    ranges = list(zip([0, *cuts], [*cuts, size], strict=True))
    covered = draw(st.lists(st.sampled_from(ranges), unique_by=lambda pair: pair[0]))
    return size, covered


class TestBlocks:
    @pytest.mark.parametrize(
        ("size", "count"),
        [(0, 0), (1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE + 1, 2), (2**63, 2**63 // BLOCK_SIZE)],
    )
    def test_count(self, size: int, count: int) -> None:
        assert block_count(size) == count

    def test_the_algorithm_does_not_drift(self) -> None:
        # Known values of XXH3_64bits, seed 0.
        assert digest_block(b"") == "2d06800538d394c2"
        assert digest_block(b"a") == "e6c632b61e964e1f"
        assert digest_block(b"abc") == "78af5f94892f3950"

    @pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "A" * 16, "g" * 16, "0" * 16 + "\n", "\u0660" * 16])
    def test_what_is_no_digest(self, text: str) -> None:
        assert is_digest(digest_block(b"x"))
        assert not is_digest(text)

    def test_other_threads_run_meanwhile(self) -> None:
        data = bytearray(256 * 2**20)
        span: list[float] = []

        def digest() -> None:
            span.append(time.perf_counter())
            digest_block(data)
            span.append(time.perf_counter())

        # A busy machine may not schedule this thread during a digest, but not every time.
        for _ in range(10):
            span.clear()
            seen = []
            thread = threading.Thread(target=digest)
            thread.start()
            while thread.is_alive():
                seen.append(time.perf_counter())
            begin, end = span
            margin = (end - begin) / 10
            if sum(begin + margin < moment < end - margin for moment in seen) > 10:
                return
        pytest.fail("the GIL was held")


class TestBlockDigester:
    @given(partitions(), st.integers(1, 100))
    def test_ranges_in_any_order(self, partition: tuple[int, list[tuple[int, int]]], block_size: int) -> None:
        size, ranges = partition
        data = noise(size)
        digester = BlockDigester(data + b"unused", size, block_size=block_size)
        for begin, end in ranges:
            digester.advance(begin, end)
        assert digester.finish() == digests_of(data, block_size)

    def test_blocks_of_default_size(self) -> None:
        data = noise(2 * BLOCK_SIZE + 5)
        digester = BlockDigester(data, len(data))
        digester.advance(0, BLOCK_SIZE)
        assert digester.finish() == digests_of(data, BLOCK_SIZE)

    def test_a_block_is_read_only_when_it_is_final(self) -> None:
        buffer = bytearray(4 * SMALL)
        data = noise(len(buffer))
        with BlockDigester(buffer, len(buffer), block_size=SMALL) as digester:
            # The first byte comes last, as an object's header does.
            for begin in range(1, len(data), 50):
                end = min(begin + 50, len(data))
                buffer[begin:end] = data[begin:end]
                digester.advance(begin, end)
            buffer[0] = data[0]
            assert digester.finish() == digests_of(data)

    def test_several_threads_may_fill_a_buffer(self) -> None:
        data = noise(200 * SMALL)
        buffer = bytearray(len(data))
        digester = BlockDigester(buffer, len(data), block_size=SMALL)

        def fill(first: int) -> None:
            for begin in range(first * 10, len(data), 40):
                end = min(begin + 10, len(data))
                buffer[begin:end] = data[begin:end]
                digester.advance(begin, end)

        threads = [threading.Thread(target=fill, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert digester.finish() == digests_of(data)

    def test_several_digesters_at_once(self) -> None:
        data = [noise(1000 + number) for number in range(20)]
        digesters = [BlockDigester(each, len(each), block_size=SMALL) for each in data]
        for digester, each in zip(digesters, data, strict=True):
            digester.advance(0, len(each) // 2)
        assert [digester.finish() for digester in digesters] == [digests_of(each) for each in data]

    def test_any_kind_of_buffer(self) -> None:
        data = noise(8 * SMALL)
        for buffer in (bytearray(data), memoryview(data).cast("d"), memoryview(data).cast("B", (8, SMALL))):
            assert BlockDigester(buffer, len(data), block_size=SMALL).finish() == digests_of(data)
        assert BlockDigester(b"", 0).finish() == ()
        assert BlockDigester(data, 0).finish() == ()

    @pytest.mark.parametrize("end", ["finish", "abort", "leave"])
    def test_lets_go_of_the_buffer(self, end: str) -> None:
        with mmap.mmap(-1, 10 * BLOCK_SIZE) as mapping:
            with BlockDigester(mapping, len(mapping)) as digester:
                digester.advance(0, len(mapping))
                with pytest.raises(BufferError):
                    mapping.close()
                if end != "leave":
                    getattr(digester, end)()
                    mapping.close()
            mapping.close()


class TestVerifyBlocks:
    def test_every_changed_byte_is_found(self) -> None:
        data = bytearray(noise(3 * SMALL + 7))
        digests = digests_of(bytes(data))
        verify_blocks(data, digests, SMALL)
        for position in range(len(data)):
            data[position] ^= 1 << (position % 8)
            with pytest.raises(DigestMismatchError, match=f"block {position // SMALL},"):
                verify_blocks(data, digests, SMALL)
            data[position] ^= 1 << (position % 8)

    def test_every_truncation_is_found(self) -> None:
        data = noise(2 * SMALL + 7)
        digests = digests_of(data)
        for length in range(len(data)):
            with pytest.raises(DigestMismatchError):
                verify_blocks(data[:length], digests, SMALL)
        with pytest.raises(DigestMismatchError, match="3 digests are recorded"):
            verify_blocks(data[: 2 * SMALL], digests, SMALL)

    def test_says_where(self) -> None:
        data = bytearray(noise(4 * SMALL - 1))
        digests = digests_of(bytes(data))[1:]
        part = memoryview(data)[SMALL:]
        verify_blocks(part, digests, SMALL, first_block=1)
        data[2 * SMALL] ^= 255
        data[-1] ^= 255
        with pytest.raises(DigestMismatchError) as raised:
            verify_blocks(part, digests, SMALL, first_block=1, path="/base/object")
        shown = str(raised.value)
        assert f"block 2, bytes {2 * SMALL} to {3 * SMALL}," in shown
        assert "2 of 3 blocks differ" in shown
        assert raised.value.path == "/base/object"
        data[2 * SMALL] ^= 255
        with pytest.raises(DigestMismatchError, match=f"block 3, bytes {3 * SMALL} to {4 * SMALL - 1},"):
            verify_blocks(part, digests, SMALL, first_block=1)

    def test_nothing_is_fine(self) -> None:
        verify_blocks(b"", ())

    def test_lets_go_of_the_buffer(self) -> None:
        with mmap.mmap(-1, SMALL) as mapping:
            verify_blocks(mapping, [digest_block(bytes(SMALL))])
            mapping.close()
        with mmap.mmap(-1, SMALL) as mapping:
            with pytest.raises(DigestMismatchError):
                verify_blocks(mapping, ["0" * 16])
            gc.collect()
            mapping.close()


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class TestProcesses:
    def test_a_forked_child_starts_its_own_threads(self) -> None:
        data = noise(100 * SMALL)
        with BlockDigester(data, len(data), block_size=SMALL) as before:
            before.advance(0, len(data))
        child = os.fork()
        if not child:
            status = 1
            try:
                digester = BlockDigester(data, len(data), block_size=SMALL)
                digester.advance(0, len(data))
                status = digester.finish() != digests_of(data)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_exit_with_work_left_is_clean(self, tmpfs: Path) -> None:
        file = tmpfs / "object"
        file.touch()
        os.truncate(file, 8 * BLOCK_SIZE)
        script = """
            import mmap, sys
            from ml_flashpoint.format.digest import BlockDigester
            with open(sys.argv[1], "r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0)
            digesters = [BlockDigester(mapping, len(mapping)) for _ in range(8)]
            for digester in digesters:
                digester.advance(0, len(mapping))
        """
        result = run(script, str(file))
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    def test_works_without_threads_while_the_interpreter_exits(self) -> None:
        script = """
            import atexit
            def last():
                from ml_flashpoint.format import digest
                digester = digest.BlockDigester(b"abc", 3)
                digester.advance(0, 3)
                print(*digester.finish())
            atexit.register(last)  # before that of the module, hence run after it
            from ml_flashpoint.format import digest
            digester = digest.BlockDigester(b"abc", 3)
            digester.advance(0, 3)
            print(*digester.finish())
        """
        result = run(script)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.split() == ["78af5f94892f3950"] * 2

    def test_works_where_no_thread_can_be_started(self) -> None:
        script = """
            import resource, threading
            from ml_flashpoint.format.digest import BlockDigester
            threading.stack_size(2**40)  # more than there is address space to spare
            resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
            digester = BlockDigester(b"abc", 3)
            digester.advance(0, 3)
            assert threading.active_count() == 1
            print(*digester.finish())
        """
        result = run(script)
        assert (result.returncode, result.stderr, result.stdout) == (0, "", "78af5f94892f3950\n")


@pytest.mark.parametrize("finishes", ["at once", "later", "never"])
def test_a_digester_that_begins_in_a_moment_gives_the_same(finishes: str) -> None:
    data = bytes(range(256)) * 64
    with BlockDigester(data, len(data), block_size=1000) as digester:
        digester.advance_soon(0.01)
        if finishes == "never":
            return
        if finishes == "later":
            time.sleep(0.02)
        with BlockDigester(data, len(data), block_size=1000) as other:
            assert digester.finish() == other.finish()
