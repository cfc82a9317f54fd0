"""Jobs of torchtitan: its small Llama with dropout. Functions for `tests.support.forked`, and a script for clusters.

The script trains, to be killed; and once more, undisturbed and without anything of ours, in the life that gets to the
end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.state_digest import digest

OWN_EVERY = 1000
KINDS = {"fsdp2": {}, "hsdp": {"data_parallel_replicate_degree": 2}, "tp": {"tensor_parallel_degree": 2}}
Told = Callable[[int, Any], object]


def trainer_of(steps: int, folder: Path, seed: int, base: Path | None, **options: Any) -> Any:
    """Return a trainer; without a base container, of torchtitan's own manager, which is disabled.

    ``options``: ``kind``, ``workers``, ``validates``, those of torchtitan's checkpoints, and of `Flashpoint`.
    """
    from ml_flashpoint.adapter.torchtitan import attach
    from tests.support import titan

    config = titan.example.small(steps, str(folder))
    config.debug.seed, config.metrics.log_freq = seed, 1
    stock = config.checkpoint
    stock.interval, stock.last_save_model_only = OWN_EVERY, False
    for name in [name for name in options if hasattr(stock, name)]:
        setattr(stock, name, options.pop(name))
    config.dataloader.num_workers = options.pop("workers", 0)
    if every := options.pop("validates", 0):
        config.validator.enable, config.validator.freq, config.validator.steps = True, every, 1
        config.validator.dataloader = config.dataloader
    for name, degree in KINDS[options.pop("kind", "fsdp2")].items():
        setattr(config.parallelism, name, degree)
    if base is not None:
        attach(config, base, **{"strict": True, "deadline_s": 60, **options})
    return config.build()


def train(trainer: Any, told: Told = lambda step, loss: None) -> dict[str, Any]:
    """Train to the end. Return what a run can be compared by."""
    losses: dict[str, float] = {}
    log = trainer.metrics_processor.log

    def log_and_tell(step: int, average: float, largest: float, norm: float, **more: Any) -> None:
        log(step, average, largest, norm, **more)
        losses[str(step)] = average
        told(step, average)

    trainer.metrics_processor.log = log_and_tell
    trainer.train()
    found = {
        "losses": losses,
        "weights": digest([each.state_dict() for each in trainer.model_parts]),
        "optimizer": digest(trainer.optimizers.state_dict()),
        "scheduler": [trainer.lr_schedulers.state_dict(), trainer.lr_schedulers.get_metrics()],
        "trainer": trainer.state_dict(),
        "random": digest(torch.get_rng_state()),
    }
    trainer.close()
    return found


def alone(report: Any, folder: Path, function: Callable[..., Any], arguments: Any, named: Any) -> Any:
    """Call a function in a job of one rank."""
    os.environ["LOCAL_RANK"] = "0"
    multiprocessing.set_start_method("fork", force=True)  # for workers of loaders, as in any other program
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return function(*arguments, **named)
    finally:
        torch.distributed.destroy_process_group()
        (folder / "store").unlink(missing_ok=True)


class Interruption(Exception):
    """Ends a training as a failure does."""


def trained(steps: int, folder: Path, base: Path | None, *, until: int = 0, seed: int = 7, **options: Any) -> Any:
    """Train, up to the midst of the step after ``until``. Return what came of it, or nothing."""
    trainer = trainer_of(steps, folder, seed, base, **options)

    def told(step: int, loss: Any) -> None:
        if base is not None:
            assert trainer.checkpointer.flashpoint.wait(60)  # so that no save finds memory in use
        if until and step > until:
            raise Interruption

    try:
        return train(trainer, told)
    except Interruption:
        trainer.close()  # as torchtitan does
        return None


def loaded(folder: Path, base: Path | None, *, late: str = "", **options: Any) -> tuple[bool, int, str | None]:
    """Return what a new trainer's load says, the step that it is at then, and where that came from in memory.

    ``late``: name of a checkpoint of torchtitan's that appears, in the place of "late", once ranks have agreed on one.
    """
    trainer = trainer_of(100, folder, 9, base, **options)
    if late:
        agreed, checkpoints = trainer.checkpointer.flashpoint.agreed, folder / "checkpoint"

        def agreed_late(step: int) -> int:
            (checkpoints / "late").rename(checkpoints / late)
            return int(agreed(step))

        trainer.checkpointer.flashpoint.agreed = agreed_late
    is_loaded = trainer.checkpointer.load(trainer.config.checkpoint.load_step)
    recovery = None if base is None else trainer.checkpointer.flashpoint.last_recovery
    trainer.close()
    return is_loaded, trainer.step, None if recovery is None else recovery.source


def stock(steps: int, folder: Path, **options: Any) -> Any:
    """Train with torchtitan's own manager."""
    return train(trainer_of(steps, folder, 7, None, enable=True, **options))


def seeded(folder: Path, base: Path) -> None:
    """Make a seed checkpoint, as torchtitan's program does."""
    trainer = trainer_of(3, folder, 7, base, create_seed_checkpoint=True)
    trainer.checkpointer.save(curr_step=0, last_step=True)
    trainer.close()


def parsed(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Return settings as torchtitan's command line makes them of a registry in a folder."""
    import sys

    from torchtitan.config import ConfigManager

    sys.path.insert(0, str(folder))
    command = ["--module", "my_configs", "--config", "llama3_debugmodel_in_memory", *arguments]
    found = ConfigManager().parse_args(command).checkpoint
    return {name: getattr(found, name) for name in ("enable", "base", "every_n_steps", "interval")}


def main() -> None:
    from tests.support.worker import base_path, leave, report
    from tests.workers.training import gate_of

    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="fsdp2", choices=KINDS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--gates", default="", help="steps to stop after until their files are there, by commas")
    given = parser.parse_args()
    torch.set_num_threads(1)
    root, life = base_path().parent.parent, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # Other random numbers, and weights, in each life: all of these come back from memory.
    trainer = trainer_of(given.steps, root / "own", 7 + life, base_path(), kind=given.kind)

    def told(step: int, loss: Any) -> None:
        report(step=step, loss=loss)
        if str(step) in given.gates.split(",") and not gate_of(root, step).exists():
            assert trainer.checkpointer.flashpoint.wait()
            report(safe_at=step)
            while not gate_of(root, step).exists():
                time.sleep(0.05)

    load = trainer.checkpointer.load

    def load_and_tell(step: int = -1) -> bool:
        loaded = bool(load(step))
        report(resumed=trainer.step)
        return loaded

    trainer.checkpointer.load = load_and_tell
    report(ended=train(trainer, told))
    report(undisturbed=train(trainer_of(given.steps, root / "undisturbed", 7, None, kind=given.kind)))
    torch.distributed.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
