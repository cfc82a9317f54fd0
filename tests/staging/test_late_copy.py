"""A copy that goes on in the background: all of it arrives, and nobody is told before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.staging.copy import cut
from ml_flashpoint.staging.late_copy import SLICE, LateCopy

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def _copy(sources: list[torch.Tensor], **options: object) -> tuple[LateCopy, list[torch.Tensor]]:
    targets = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]
    pieces = cut((target.nbytes for target in targets), SLICE)
    return LateCopy(targets, sources, pieces, **options), targets  # type: ignore[arg-type]


def _same(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(_DTYPES), st.booleans()), max_size=6), st.integers(1, 3)
)
def test_all_of_it_arrives_whoever_copies(kinds: list[tuple[int, torch.dtype, bool]], threads: int) -> None:
    sources = [torch.arange(4 * n).reshape(4, n).to(dtype) for n, dtype, _ in kinds]
    sources = [s.t() if turned else s for s, (_, _, turned) in zip(sources, kinds, strict=True)]
    late, targets = _copy(sources)
    others = [threading.Thread(target=late.copy) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    late.finish()
    assert late.over
    late.wait(1)
    assert _same(targets, sources)
    for thread in others:
        thread.join()


def test_large_tensors_are_copied_by_slices() -> None:
    sources = [torch.randn(3 * SLICE // 4 + 5), torch.randn(SLICE, 2).t()[:, : SLICE // 8], torch.randn(3)]
    late, targets = _copy(sources)
    late.finish()
    late.wait(1)
    assert _same(targets, sources)


def test_the_check_comes_last_and_before_anybody_is_told() -> None:
    order: list[str] = []
    sources = [torch.ones(10), torch.ones(10)]
    late, targets = _copy(sources, check=lambda: order.append(f"check {_same(targets, sources)} {late.over}"))
    late.when_over(lambda: order.append("over"))
    with pytest.raises(SaveError, match="not copied within 0 s"):
        late.wait(0)
    late.copy()
    late.when_over(lambda: order.append("at once"))
    assert order == ["check True False", "over", "at once"]


def test_a_check_that_fails_is_why_it_failed() -> None:
    def check() -> None:
        raise SaveError("changed")

    late, _ = _copy([torch.ones(3)], check=check)
    late.finish()
    with pytest.raises(SaveError, match="could not be copied: changed"):
        late.wait(1)


def test_who_waits_is_told_after_all_that_depends_on_the_copy() -> None:
    late, _ = _copy([torch.ones(3)])
    went: list[str] = []

    def go_on() -> None:
        with pytest.raises(SaveError, match="within 0 s"):
            late.wait(0)
        late.when_over(lambda: went.append("second"))
        went.append("first")

    def fail() -> None:
        raise ValueError("of theirs")

    late.when_over(go_on)
    late.when_over(fail)
    late.finish()
    assert went == ["first", "second"]
    with pytest.raises(SaveError, match="of theirs"):
        late.wait(1)


def test_a_copy_that_fails_stops() -> None:
    late = LateCopy([torch.ones(3), torch.ones(SLICE)], [torch.ones(4), torch.ones(SLICE)], cut([12, 4 * SLICE], SLICE))
    late.finish()
    assert late.error is not None
    with pytest.raises(SaveError, match="could not be copied"):
        late.wait(1)


def test_what_is_given_up_is_not_copied_and_not_kept() -> None:
    source = torch.ones(10)
    late, targets = _copy([source, torch.ones(SLICE)])
    known, called = weakref.ref(source), list[bool]()
    late.when_over(lambda: called.append(late.over))
    late.cancel(SaveError("given up"))
    assert called == [False]
    assert late.over
    del source
    assert known() is None
    targets[0].fill_(7)
    late.finish()
    assert targets[0].eq(7).all()
    with pytest.raises(SaveError, match="given up"):
        late.wait(1)
    late.cancel(SaveError("again"))
    assert "given up" in str(late.error)


class _Held(torch.Tensor):
    """A target whose copy calls a function first."""

    copying: Callable[[], object]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "foreach_copy" in func.__name__:
            args[0][0].copying()
            args = ([each.as_subclass(torch.Tensor) for each in args[0]], *args[1:])
        return super().__torch_function__(func, types, args, kwargs or {})


def _held(copying: Callable[[], object]) -> tuple[LateCopy, _Held]:
    target = torch.zeros(5).as_subclass(_Held)
    target.copying = copying
    return LateCopy([target], [torch.ones(5)], cut([20], SLICE)), target


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_nobody_is_told_while_another_thread_still_copies() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def copying() -> None:
        begun.set()
        assert go_on.wait(30)

    late, _ = _held(copying)
    thread = threading.Thread(target=late.copy)
    thread.start()
    assert begun.wait(30)
    late.cancel(SaveError("given up"))
    assert not late.over  # the bytes may still be written to
    late.copy()
    assert not late.over
    go_on.set()
    thread.join()
    assert late.over


def test_who_waits_for_a_copy_that_hangs_waits_no_longer_than_the_deadline() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def copying() -> None:
        begun.set()
        assert go_on.wait(30)

    late, _ = _held(copying)
    thread = threading.Thread(target=late.copy)
    thread.start()
    assert begun.wait(30)
    late.finish(deadline_s=0.01)
    assert not late.over  # the bytes may still be written to
    go_on.set()
    thread.join()
    with pytest.raises(SaveError, match="not copied within 0 s"):
        late.wait(1)


def test_an_interrupt_while_a_slice_is_copied_fails_the_copy() -> None:
    late, _ = _held(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        late.finish()
    with pytest.raises(SaveError, match="interrupted"):
        late.wait(1)


def test_an_interrupt_while_slices_are_given_out_fails_the_copy() -> None:
    class Interrupting(list[torch.Tensor]):
        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__(key) if key.start == 0 else _interrupt()

    sources = Interrupting([torch.ones(SLICE), torch.ones(SLICE)])
    late, _ = _copy(sources)
    other = threading.Thread(target=late.copy)
    with pytest.raises(KeyboardInterrupt):
        late.finish()
    other.start()
    other.join()
    with pytest.raises(SaveError, match="interrupted"):
        late.wait(1)


def test_an_interrupt_while_others_are_told_comes_after_all_are() -> None:
    late, _ = _copy([torch.ones(3)])
    told: list[str] = []
    late.when_over(_interrupt)
    late.when_over(lambda: told.append("second"))
    with pytest.raises(KeyboardInterrupt):
        late.finish()
    assert (late.over, told) == (True, ["second"])
    late.copy()  # once
