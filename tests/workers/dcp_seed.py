"""Runs the user guide's code on DCP as it stands there, on every rank, and reports what it loaded."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.support.seed_snippets import INITIALIZATION, runnable_imports, runnable_recovery, runnable_saving
from tests.support.sharded import Training, check
from tests.support.worker import base_path, leave, rank, report


def main() -> None:
    dist.init_process_group("gloo")
    names: dict[str, object] = {}
    exec(runnable_imports(), names)
    names |= {"checkpoint_dir": str(base_path()), "base_container": str(base_path())}
    names["checkpoint_base_container"] = str(base_path())
    exec(INITIALIZATION, names)
    training = Training("fsdp")
    for step in (1, 2, 3):
        training.step(step)
        names |= {"state_dict": training.state() | {"step": step}, "current_step": step}
        exec(runnable_saving(), names)
        names["future"].result(60)  # type: ignore[attr-defined]
        expected = training.whole()
        other = Training("fsdp", seed=7)
        other.step(70)
        state = other.state() | {"step": 0}
        names["state_dict"] = state
        exec(runnable_recovery(), names)
        other.load(state)
        check(other.whole(), expected)
        report(step=state["step"], found=str(names["latest_saved_checkpoint_id"]))
    assert rank() == torch.distributed.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
