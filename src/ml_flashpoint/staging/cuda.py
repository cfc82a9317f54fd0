"""CUDA as this package uses it.

Owns the questions that may be asked without initialising CUDA in a process that does not use it (after which a process
cannot fork children that do), and which device takes the place of the one that something was saved from.
"""

from __future__ import annotations

from collections.abc import Collection

import torch


def in_use() -> bool:
    """Whether this process has CUDA initialised; False in its forked children, which cannot use it.

    ``torch.cuda.is_available()`` would initialise the driver to find out.
    """
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def device_count() -> int:
    """Devices that this process may use. Asks NVML where it can, so nothing is initialised."""
    return torch.cuda.device_count()


def device_today(saved: str, ours: Collection[torch.device] = ()) -> torch.device:
    """Where a tensor is loaded to that was on ``saved`` when it was saved, maybe by another rank or on another node.

    Args:
        saved: the device's name. Its index means nothing today, but where this process works on several devices.
        ours: the devices that this process works on, as far as they are known.

    Returns:
        The only CUDA device in ``ours``, or of several the one of that name, else the current one. The CPU where there
        is no CUDA device, or the tensor was on none.
    """
    if not saved.startswith("cuda") or not device_count():
        return torch.device("cpu")
    mine = {device for device in ours if device.type == "cuda"}
    if len(mine) == 1:
        return mine.pop()
    if (same := torch.device(saved)) in mine:
        return same
    return torch.device("cuda", torch.cuda.current_device())
