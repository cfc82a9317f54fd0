"""At which steps a loop saves: at every so many, or as often as costs least.

Owns the choice: what a save costs and a step takes, as each rank measures it, how often the job fails, and what follows
from that. The ranks' measurements come together where they agree on a save anyway: see `save_exchange`.

A choice holds from the save after the one in which ranks have come to it, if that one was good, so it is the same on
all of them at each step. Intervals are powers of two, and saves are made at multiples of them: should ranks differ
after all, because one of them lost the very last message of a save, the steps of the longer interval are among those
of the shorter one, and they meet again. That costs little: the total is flat around its optimum.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ml_flashpoint.core.arguments import checked_integer, checked_seconds
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.ranks.goodput import best_interval_s

_FIRST_SAVES: Final = 5
"""That cost more than those to come, since memory is made for them, and are too few to tell."""
_MOST: Final = 1 << 16
_SAMPLES: Final = 64
_CLEARLY: Final = 1.6
"""By what factor the best interval must differ from the present one: more than a rounding, not to go to and fro."""
_MOST_AT_ONCE: Final = 8
"""By what factor an interval grows at most: it may have been measured while something else slowed saves down."""
_ASSUMED_S: Final = 6 * 3600.0
"""Without a failure, so many seconds are taken to have gone by until now. Later, it counts less and less."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank knows.

    Attributes:
        step_s: seconds that a step takes.
        save_s: by how many seconds a save makes steps longer, in all.
        observed_s: for how many seconds the job has been seen.
        starts: how often it was started since.
    """

    step_s: float
    save_s: float
    observed_s: float
    starts: int


@dataclass(frozen=True, slots=True)
class Choice:
    """How often to save, and why, in words."""

    every: int
    reason: str


class SaveInterval:
    """See the module. One for each rank; to be used by the training thread, but for :meth:`agree`, :meth:`hear` and
    :meth:`confirm`, which belong to the thread that has the exchange of a save, and are over before the next one.

    Args:
        every: number of steps, or ``"auto"``.
        mtbf_s: mean seconds between failures of the whole job; by default what its restarts show.

    Attributes:
        every: the interval now, in steps.
        reason: why; None if it was given, or nothing is measured yet.
        given: what was asked for.
        measured: what this rank knows, as of the begin of the save; None if it is not enough, or nobody asks.
        since_s, starts: when the job was first seen, in seconds since the epoch, and how often it was started since.

    Raises:
        InvalidArgumentError: an argument is unusable.
    """

    def __init__(self, every: int | Literal["auto"] = 1, mtbf_s: float | None = None) -> None:
        self._auto = every == "auto"
        if mtbf_s is not None and not self._auto:
            raise InvalidArgumentError("goes with every_n_steps='auto' only", argument="mtbf_s", value=mtbf_s)
        if isinstance(every, str) and not self._auto:
            raise InvalidArgumentError("must be an integer, or 'auto'", argument="every_n_steps", value=every)
        self._mtbf_s = None if mtbf_s is None else checked_seconds("mtbf_s", mtbf_s)
        self.given = every
        self.every = 1 if isinstance(every, str) else checked_integer("every_n_steps", every, 1)
        self.reason: str | None = None
        self.since_s, self.starts = time.time(), 1
        self._heard: Choice | None = None
        self._confirmed: Choice | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """The job goes on from another step, on all ranks: save at each one, until there are new measurements."""
        self._began: float | None = None
        self._quiet: deque[float] = deque(maxlen=_SAMPLES)  # seconds of steps, while no save was under way
        self._busy: deque[float] = deque(maxlen=_SAMPLES)
        self._held: deque[float] = deque(maxlen=_SAMPLES)
        self._busy_steps = self._saves = 0
        if self._auto:
            self.every, self.reason, self._heard, self._confirmed = 1, None, None, None
        self.measured: Measured | None = None

    # ---- measuring, and saving by it ----------------------------------------------------------------------

    def passed(self, now: float, *, saving: bool) -> None:
        """A step is done, at this time of a clock; ``saving``: a save was under way meanwhile."""
        if self._began is not None and self._saves >= _FIRST_SAVES:
            (self._busy if saving else self._quiet).append(now - self._began)
            self._busy_steps += saving
        self._began = now

    def saved(self, held_s: float) -> None:
        """A save has held the loop for so long, waits of optimizers included, until the next one begins."""
        self._saves += 1
        if self._saves > _FIRST_SAVES:
            self._held.append(held_s)

    def is_due(self, step: int) -> bool:
        """Whether to save at this step."""
        return step % self.every == 0

    def begin(self) -> Choice | None:
        """A save begins. What ranks have come to holds from now on; returns it if it changes anything."""
        self.measured = self._measure()
        choice, self._confirmed = self._confirmed, None
        if choice is None:
            return None
        changed = choice.every != self.every
        self.every, self.reason = choice.every, choice.reason
        return choice if changed else None

    def _measure(self) -> Measured | None:
        if not self._auto or len(self._held) < _FIRST_SAVES or not self._busy:
            return None
        save_s, busy_s = statistics.median(self._held), statistics.median(self._busy)
        if len(self._quiet) < _FIRST_SAVES:
            step_s = max(busy_s - save_s, 0.0)
        else:
            step_s = statistics.median(self._quiet)
            steps = self._busy_steps / (self._saves - _FIRST_SAVES)
            save_s = max(save_s, steps * (busy_s - step_s))
        observed_s = time.time() - self.since_s  # which a file says that may be damaged
        return Measured(step_s, save_s, observed_s if 0 < observed_s < math.inf else 0.0, max(self.starts, 1))

    # ---- the choice ---------------------------------------------------------------------------------------

    def agree(self, measured: Sequence[Measured | None]) -> Choice | None:
        """What all ranks take, on the coordinator; None: what they have."""
        known = [each for each in measured if each is not None]
        if len(known) < len(measured) or not known:
            return None
        step_s, save_s = max(each.step_s for each in known), max(each.save_s for each in known)
        longest = max(known, key=lambda each: (each.starts, each.observed_s))
        mtbf_s = self._mtbf_s or (_ASSUMED_S + longest.observed_s) / longest.starts
        best = min(
            max(best_interval_s(save_s, mtbf_s) / max(step_s, 1e-9), 1.0), float(min(_MOST, _MOST_AT_ONCE * self.every))
        )
        if self.reason is not None and 1 / _CLEARLY < best / self.every < _CLEARLY:
            return None
        every = 2 ** round(math.log2(best))
        failures = f"a failure every {mtbf_s / 3600:.3g} h" + ("" if self._mtbf_s else f" ({longest.starts} starts)")
        return Choice(
            every, f"a step takes {step_s:.3g} s, a save {save_s:.3g} s of it, and {failures} is to be expected"
        )

    def hear(self, choice: Choice | None) -> None:
        """The coordinator's answer, for a save that has begun."""
        self._heard = choice

    def confirm(self) -> None:
        """That save was good on all ranks."""
        if self._heard is not None:
            self._confirmed, self._heard = self._heard, None
