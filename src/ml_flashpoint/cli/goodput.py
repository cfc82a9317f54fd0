"""How often to save, and what share of a job's time is training then: the formulas, and nothing else.

Owns two results for a job whose failures come at random, on average one every M seconds (exponentially distributed):

* the interval between saves that costs least: J. W. Young, "A first order approximation to the optimum checkpoint
  interval", Communications of the ACM 17 (1974), improved by J. T. Daly, "A higher order estimate of the optimum
  checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006);
* the share of time that is training, at any interval: the complete model of Daly's paper.
"""

from __future__ import annotations

import math


def best_interval_s(held_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that cost least, by Daly.

    Args:
        held_s: seconds that a save keeps the training from going on.
        mtbf_s: mean seconds between failures of the whole job.
    """
    if held_s >= 2 * mtbf_s:
        return mtbf_s
    x = held_s / (2 * mtbf_s)
    return math.sqrt(2 * held_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - held_s


def goodput(interval_s: float, held_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of a long job's time that is training which is never done again, by Daly.

    Args:
        interval_s: seconds of training between two saves.
        held_s: see `best_interval_s`.
        restart_s: seconds from a failure until training goes on, during which the next failure may come.
        mtbf_s: see `best_interval_s`.
    """
    exponent = restart_s / mtbf_s + (interval_s + held_s) / mtbf_s
    if exponent > 500:  # never gets anywhere, and exp() would overflow
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + held_s) / mtbf_s))
