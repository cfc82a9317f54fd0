"""The machine, groups of processes and barriers: what a program needs around a dictionary.

Gathers it, so that one import is enough. Thin: on `multiprocessing` for one machine, on Ray where the program has
called ``ray.init``.
"""

from ml_flashpoint.ddict.errors import BarrierBrokenError, ProcessFailedError
from ml_flashpoint.ddict.native.barrier import Barrier
from ml_flashpoint.ddict.native.process import Policy, ProcessTemplate, ThisProcess, this_process
from ml_flashpoint.ddict.native.processes import CollectiveGroup, ProcessGroup, RankInfo, System
from ml_flashpoint.ddict.native.ray import Node

__all__ = [
    "Barrier",
    "BarrierBrokenError",
    "CollectiveGroup",
    "Node",
    "Policy",
    "ProcessFailedError",
    "ProcessGroup",
    "ProcessTemplate",
    "RankInfo",
    "System",
    "ThisProcess",
    "this_process",
]
