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
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format import knobs
from ml_flashpoint.format.digest import BLOCK_SIZE, digest_block, digest_blocks
from ml_flashpoint.format.errors import DigestMismatchError, InvalidArgumentError
from ml_flashpoint.format.manifest import ObjectRecord

SMALL = 64


def digests_of(data: bytes, block_size: int = SMALL) -> tuple[str, ...]:
    return tuple(digest_block(data[begin : begin + block_size]) for begin in range(0, len(data), block_size))


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


class TestBlocks:
    def test_the_algorithm_does_not_drift(self) -> None:
        # Known values of XXH3_64bits, seed 0.
        assert digest_block(b"") == "2d06800538d394c2"
        assert digest_block(b"a") == "e6c632b61e964e1f"
        assert digest_block(b"abc") == "78af5f94892f3950"

    def test_other_threads_run_meanwhile(self) -> None:
        data = bytearray(64 * 2**20)
        span: list[float] = []

        def digest() -> None:
            span.append(time.perf_counter())
            digest_block(data)
            span.append(time.perf_counter())

        # A busy machine may not schedule this thread during a digest, but not every time.
        for _ in range(30):
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

    def test_blocks_are_small_in_tests_and_16_mib_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert knobs.block_bytes() == 4096
        monkeypatch.delenv(knobs.BLOCK_BYTES_VARIABLE)
        assert knobs.block_bytes() == BLOCK_SIZE == 16 * 2**20
        for text in ("", "0", "-4096", "2048", "4096.0", "4 KiB", "٤٠٩٦", str(2**31), "9" * 5000):
            monkeypatch.setenv(knobs.BLOCK_BYTES_VARIABLE, text)
            with pytest.raises(InvalidArgumentError, match="FLASHPOINT_TEST_BLOCK_BYTES"):
                knobs.block_bytes()


class TestDigestBlocks:
    @given(st.integers(0, 600), st.integers(1, 100))
    def test_blocks_of_any_size(self, size: int, block_size: int) -> None:
        data = noise(size)
        assert digest_blocks(data, block_size=block_size) == digests_of(data, block_size)

    def test_several_at_once(self) -> None:
        data = [noise(1000 + number) for number in range(20)]
        with ThreadPoolExecutor(20) as pool:
            found = pool.map(lambda each: digest_blocks(each, block_size=SMALL), data)
            assert list(found) == [digests_of(each) for each in data]

    def test_any_kind_of_buffer_which_is_let_go_of(self) -> None:
        data = noise(8 * SMALL)
        for buffer in (bytearray(data), memoryview(data).cast("d"), memoryview(data).cast("B", (8, SMALL))):
            assert digest_blocks(buffer, block_size=SMALL) == digests_of(data)
        assert digest_blocks(b"") == ()
        with mmap.mmap(-1, 2 * BLOCK_SIZE + 5) as mapping:
            assert digest_blocks(mapping) == digests_of(bytes(len(mapping)), BLOCK_SIZE)
            mapping.close()


class TestCheck:
    @staticmethod
    def record_of(data: bytes) -> ObjectRecord:
        return ObjectRecord(len(data), len(data), digests_of(data), SMALL)

    def test_every_changed_byte_is_found_and_named(self) -> None:
        data = bytearray(noise(3 * SMALL + 7))
        record = self.record_of(bytes(data))
        for begin in (0, SMALL):
            part = memoryview(data)[begin:]
            record.check(part, begin)
            for position in range(begin, len(data)):
                data[position] ^= 1 << (position % 8)
                block = position // SMALL
                with pytest.raises(
                    DigestMismatchError, match=f"block {block}, from byte {block * SMALL} on,"
                ) as raised:
                    record.check(part, begin, path="/base/object")
                assert raised.value.path == "/base/object"
                data[position] ^= 1 << (position % 8)

    def test_every_truncation_and_more_is_found(self) -> None:
        data = noise(2 * SMALL + 7)
        record = self.record_of(data)
        for length in set(range(len(data))) - {0, SMALL, 2 * SMALL}:
            with pytest.raises(DigestMismatchError):
                record.check(data[:length])
        with pytest.raises(DigestMismatchError):
            record.check(data + noise(SMALL))
        whole = data[: 2 * SMALL]
        with pytest.raises(DigestMismatchError, match="block 2"):
            self.record_of(whole).check(whole + noise(SMALL))

    def test_the_buffer_is_let_go_of(self) -> None:
        with mmap.mmap(-1, SMALL) as mapping:
            self.record_of(bytes(SMALL)).check(mapping)
            with pytest.raises(DigestMismatchError):
                self.record_of(b"x" * SMALL).check(mapping)
            gc.collect()
            mapping.close()


def run(script: str) -> list[str]:
    argv = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.split()


class TestProcesses:
    def test_a_forked_child_starts_its_own_threads(self) -> None:
        data = noise(100 * SMALL)
        digest_blocks(data, block_size=SMALL)
        child = os.fork()
        if not child:
            status = 1
            try:
                status = digest_blocks(data, block_size=SMALL) != digests_of(data)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_works_without_threads_while_the_interpreter_exits(self) -> None:
        script = """
            import atexit
            def last():
                from ml_flashpoint.format import digest
                print(*digest.digest_blocks(b"abc" * 2, block_size=3))
            atexit.register(last)  # before that of the module, hence run after it
            from ml_flashpoint.format import digest
            print(*digest.digest_blocks(b"abc" * 2, block_size=3))
        """
        assert run(script) == ["78af5f94892f3950"] * 4
