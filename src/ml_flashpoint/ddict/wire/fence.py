"""The order of a handle's requests: none takes effect after a later one.

Owns the rule by which a request that was given up is refused when it arrives late. A handle counts generations. The
next one begins when a connection breaks before the answer, since the request may still be read and carried out, and
with each rollback. Every request of a handle that changes something carries the generation that it was made in.
Managers and the coordinator keep the newest generation that they have heard of each handle, and refuse older ones.

So a later write at the same manager, or the discarding of a rollback, which reaches all managers, ends what was given
up. Threads of one handle can overtake each other: a request that is refused has changed nothing, and is made again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ml_flashpoint.ddict.errors import StaleRequestError

_OVER: Final = 1 << 62  # the generation of a handle that asks for nothing more


class _Heard(NamedTuple):
    epoch: int  # that it was heard in
    generation: int


class Fence:
    """The newest generation of each handle that one server has heard. Not thread-safe."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}

    def hear(self, handle: str, generation: int, epoch: int = 0) -> bool:
        """Note a request. Return True if it is the first of its generation. ``epoch``: of the request, where
        requests of an earlier epoch are refused as such. Raises `StaleRequestError`: a later generation was heard."""
        newest = self._heard.get(handle, _Heard(0, 0))
        if generation < newest.generation:
            raise StaleRequestError("the handle that made this request has given it up")
        self._heard[handle] = _Heard(max(epoch, newest.epoch), generation)
        return generation > newest.generation

    def end(self, handle: str, generation: int) -> bool:
        """Note the last request of a handle. Return False if that was heard before."""
        if self._heard.get(handle, _Heard(0, 0)).generation == _OVER:
            return False
        self.hear(handle, generation)
        self._heard[handle] = _Heard(0, _OVER)
        return True

    def begin(self, epoch: int) -> None:
        """Forget what was heard in earlier epochs, of which all requests are refused."""
        self._heard = {handle: heard for handle, heard in self._heard.items() if heard.epoch >= epoch}
