"""Runs the user guide's code on Megatron-LM as it stands there, on every rank, and reports what it loaded."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from tests.support import megatron_seed, seed_snippets
from tests.support.megatron import TorchDist, without_cuda
from tests.support.megatron_states import LAYOUTS, assert_same_state, plain, sharded_state
from tests.support.worker import base_path, leave, report, world_size


def main() -> None:
    without_cuda()
    dist.init_process_group("gloo")
    layout = LAYOUTS[world_size()][-1]
    long_term = TorchDist(base_path().parent.parent / "long-term")
    names: dict[str, Any] = {}
    exec(seed_snippets.runnable_imports(), names)
    exec(megatron_seed.IMPORTS, names)
    further_imports, loading = megatron_seed.runnable_loading()
    exec(further_imports, names)
    names |= {"checkpoint_dir": str(base_path()), "checkpoint_base_container": str(base_path())}
    exec(seed_snippets.INITIALIZATION, names)
    exec(megatron_seed.runnable_save_strategy(), names)
    exec(megatron_seed.LOAD_STRATEGY, names)
    names |= {"long_term_storage_path": long_term.folder, "regular_megatron_load_strategy": long_term.load_strategy}
    long_term.save(sharded_state(layout, 50))
    ids: Any = names["CheckpointContainerId"]
    for step in (0, 1, 2, 3):
        if step:
            version = ids.create_child(base_path(), ids.format_version_container(step))
            strategy: Any = names["megatron_save_strategy"]
            save_local_aware_megatron_checkpoint(sharded_state(layout, step), str(version), strategy, False)
            assert strategy.last_error is None
        # The guide's name for the outcome of its own first line.
        names["local_checkpoint_container"] = step > 0
        names["sharded_state_dict"] = sharded_state(layout, 0, blank=True)
        exec(loading, names)
        assert_same_state(names["state_dict"], plain(sharded_state(layout, step or 50)))
        found = names["latest_saved_checkpoint_id"]
        report(step=names["state_dict"]["step"], found=None if found is None else os.path.basename(str(found)))
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
