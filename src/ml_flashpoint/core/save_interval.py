"""At which steps a loop saves: at every so many, or as often as costs least.

Owns the choice: what a save costs and a step takes, as each rank measures it, how often the job fails, and what follows
from that. The ranks' measurements come together where they agree on a save anyway, which is the doors' business: a
coordinator collects them (`facade.save_exchange`), or they ride in a vote of which all ranks take the minimum
(`adapter.megatron.save_strategies`).

A choice holds from a place that is the same on all ranks: the save after the one in which a coordinator came to it, if
that one was good, or the vote in which they all did. Should ranks differ after all, because one of them lost the very
last message of a save, the next save that they come to together says so, even if it fails because their steps differ,
and they have one interval again. Intervals are powers of two, and saves are made at multiples of them: so the steps of
a longer interval are among those of a shorter one, and they do come together. That costs little: the total is flat
around its optimum.
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
from ml_flashpoint.core.schedule import passes_multiple
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
_BITS: Final = 31
_MOST_OFFERED: Final = 2 ** (2 * _BITS)
"""Numbers are this at most in an `offer`: they and their negatives fit into 64 bits."""


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

    def __str__(self) -> str:
        return f"from now on, every {self.every}. step is saved: {self.reason}"


class SaveInterval:
    """See the module. One for each rank; to be used by the training thread, but for :meth:`agree`, :meth:`follow`,
    :meth:`hear` and :meth:`confirm`, which belong to the thread that has the exchange of a save, and are over before
    the next one.

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
        self._quiet: deque[float] = deque(maxlen=_SAMPLES)  # seconds of turns, while no save was under way
        self._busy: deque[float] = deque(maxlen=_SAMPLES)
        self._held: deque[float] = deque(maxlen=_SAMPLES)
        self._turns = self._steps = self._busy_turns = self._saves = 0
        if self._auto:
            self.every, self.reason, self._heard, self._confirmed = 1, None, None, None
        self.measured: Measured | None = None

    # ---- measuring, and saving by it ----------------------------------------------------------------------

    def passed(self, now: float, *, saving: bool, steps: int = 1) -> None:
        """The loop has taken a turn, at this time of a clock.

        Args:
            saving: a save was under way meanwhile.
            steps: how many it counts.
        """
        if self._began is not None and self._saves >= _FIRST_SAVES:
            (self._busy if saving else self._quiet).append(now - self._began)
            self._turns += 1
            self._steps += max(steps, 1)
            self._busy_turns += saving
        self._began = now

    def saved(self, held_s: float) -> None:
        """A save has held the loop for so long, waits of optimizers included, until the next one begins."""
        self._saves += 1
        if self._saves > _FIRST_SAVES:
            self._held.append(held_s)

    def is_due(self, step: int, before: int | None = None) -> bool:
        """Whether to save at this step.

        Args:
            before: the step before, if that is not the number before.
        """
        return passes_multiple(self.every, step - 1 if before is None else before, step)

    def begin(self) -> Choice | None:
        """A save begins. What ranks have come to holds from now on; returns it if it changes anything."""
        self.measured = self._measure()
        choice, self._confirmed = self._confirmed, None
        return self._taken(choice)

    def _taken(self, choice: Choice | None) -> Choice | None:
        if choice is None:
            return None
        changed = choice.every != self.every
        self.every, self.reason = choice.every, choice.reason
        return choice if changed else None

    def _measure(self) -> Measured | None:
        if not self._auto or len(self._held) < _FIRST_SAVES or not self._busy:
            return None
        save_s, busy_s = statistics.median(self._held), statistics.median(self._busy)
        turns = self._busy_turns / (self._saves - _FIRST_SAVES)  # of each save
        if len(self._quiet) < _FIRST_SAVES:
            turn_s = max(busy_s - save_s / max(turns, 1.0), 0.0)
        else:
            turn_s = statistics.median(self._quiet)
            save_s = max(save_s, turns * (busy_s - turn_s))
        observed_s = time.time() - self.since_s  # which a file says that may be damaged, as it does the next
        starts = min(max(self.starts, 1), 2**_BITS - 1)
        step_s = turn_s * self._turns / self._steps
        return Measured(step_s, save_s, observed_s if 0 < observed_s < math.inf else 0.0, starts)

    # ---- the choice ---------------------------------------------------------------------------------------

    def agree(self, measured: Sequence[Measured | None]) -> Choice | None:
        """What all ranks take, on the coordinator; None: what they have."""
        known = [each for each in measured if each is not None]
        if len(known) < len(measured) or not known:
            return None
        longest = max(known, key=lambda each: (each.starts, each.observed_s))
        together = Measured(
            max(each.step_s for each in known),
            max(each.save_s for each in known),
            longest.observed_s,
            longest.starts,
        )
        return self._choice(together, self._mtbf_s)

    def _choice(self, known: Measured, given_s: float | None) -> Choice | None:
        mtbf_s = given_s or (_ASSUMED_S + known.observed_s) / known.starts
        most = float(min(_MOST, _MOST_AT_ONCE * self.every))
        best = min(max(best_interval_s(known.save_s, mtbf_s) / max(known.step_s, 1e-9), 1.0), most)
        stays = 1 / _CLEARLY < best / self.every < _CLEARLY
        if stays and self.reason is not None:
            return None
        failures = f"a failure every {mtbf_s / 3600:.3g} h" + ("" if given_s else f" ({known.starts} starts)")
        costs = f"a step takes {known.step_s:.3g} s, a save {known.save_s:.3g} s of it"
        every = self.every if stays else 2 ** round(math.log2(best))
        return Choice(every, f"{costs}, and {failures} is to be expected")

    def follow(self, every: int) -> None:
        """The interval of the others, in a save that this rank has begun with them. If it is another one than here,
        somebody has missed a choice."""
        if self._auto and every != self.every:
            self.every, self.reason = every, "other ranks do so: the reason was missed"

    # ---- by a coordinator ---------------------------------------------------------------------------------

    def hear(self, choice: Choice | None) -> None:
        """The coordinator's answer, for a save that has begun."""
        self._heard = choice

    def confirm(self) -> None:
        """That save was good on all ranks."""
        if self._heard is not None:
            self._confirmed, self._heard = self._heard, None

    # ---- in a vote ----------------------------------------------------------------------------------------

    def offer(self) -> tuple[int, ...]:
        """What this rank brings to a vote of which all ranks take the elementwise minimum, for :meth:`settle`. As many
        numbers on every rank, whatever it was given, and knows."""
        known = self._measure()
        every = self.every if self._auto else 0
        mtbf = _MOST_OFFERED if self._mtbf_s is None else max(_offered(self._mtbf_s * 1e3), 1)
        if known is None:
            return -every, mtbf, 0, 0, 0, 0
        # The longest history is that with the most starts, and of those the one that is longest.
        history = known.starts << _BITS | int(min(known.observed_s, 2**_BITS - 1))
        return -every, mtbf, 1, -_offered(known.step_s * 1e9), -_offered(known.save_s * 1e9), -history

    def settle(self, least: Sequence[int]) -> Choice | None:
        """Take up what follows from a vote, on all ranks alike; returns it if it changes anything."""
        if not self._auto:
            return None
        every, mtbf, known, step, save, history = least
        self.follow(-every)
        if not known:
            return None
        starts, observed = divmod(-history, 2**_BITS)
        together = Measured(-step / 1e9, -save / 1e9, float(observed), max(starts, 1))
        return self._taken(self._choice(together, None if mtbf >= _MOST_OFFERED else mtbf / 1e3))


def checked_skip(skip: int | None, every: int | Literal["auto"]) -> int:
    """How often a save that is due is left out, for another checkpoint's sake; 0 or None leaves none out.

    Raises:
        InvalidArgumentError: that is no number, or ``every`` would be chosen: all saves might be left out then, and so
            nothing measured any more.
    """
    checked = checked_integer("skip_every_n_steps", 0 if skip is None else skip, 0)
    if checked and every == "auto":
        raise InvalidArgumentError("goes with a given every_n_steps only", argument="skip_every_n_steps", value=skip)
    return checked


def _offered(number: float) -> int:
    return int(min(max(number, 0.0), _MOST_OFFERED - 1))
