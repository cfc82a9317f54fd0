"""NeMo's trainer, strategy, AutoResume and finalizer on two ranks, wrapped; cases are named on the command line.

Owns the cases. Nothing is trained here, see `tests.support.nemo_training`: what is saved is a sharded state dict of
megatron-core's, handed to the trainer's `CheckpointIO` just as `MegatronStrategy.save_checkpoint` does.
"""

from __future__ import annotations

import functools
import logging
import shutil
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nemo.lightning as nl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from megatron.core import parallel_state
from nemo.lightning.io.pl import MegatronCheckpointIO
from nemo.lightning.pytorch.strategies import MegatronStrategy
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO, AsyncFinalizerCallback

from ml_flashpoint.adapter.nemo.checkpoint_callback import flashpoint_io_of
from ml_flashpoint.adapter.nemo.checkpoint_io import (
    MLFlashpointCheckpointIO,
)
from ml_flashpoint.adapter.nemo.wrapper_util import MLFlashpointAutoResume
from ml_flashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError, UnaskedVersionsError
from tests.support.cases import go_through
from tests.support.nemo_trainers import (
    Strategy,
    attach,
    check_load,
    finish,
    save,
    settle,
    shared,
    state_of,
    trainer_of,
    trainer_with,
    version,
    without_cuda,
)
from tests.support.processes import REPOSITORY
from tests.support.worker import base_path, leave, rank, world_size

warnings.filterwarnings("ignore")

# ---- saves and loads ------------------------------------------------------------------------------------------


def sync(base: Path) -> None:
    trainer = trainer_of(base)
    theirs = trainer.strategy.checkpoint_io
    resume = wrap(trainer, str(base), async_save=False)
    io = trainer.strategy.checkpoint_io
    assert type(io) is MLFlashpointCheckpointIO
    assert io.alternate is theirs
    assert type(theirs) is MegatronCheckpointIO
    assert io.save_sharded_strategy is theirs.save_sharded_strategy
    assert resume.get_trainer_ckpt_path() is None
    for step in (1, 2):
        save(trainer, version(base, step), step)
        assert resume.get_trainer_ckpt_path() == version(base, step)
        check_load(trainer, version(base, step), step)
    # Long-term checkpoints go elsewhere, and are theirs: whole, and only there.
    folder = shared("long-term-sync")
    save(trainer, folder, 7)
    dist.barrier()
    assert (folder / "weights" / "metadata.json").is_file()
    check_load(trainer, folder, 7)
    assert resume.get_trainer_ckpt_path() == version(base, 2)
    io.remove_checkpoint(str(version(base, 2)))
    assert version(base, 2).is_dir()
    finish(trainer)


def asynchronous(base: Path) -> None:
    """With overlap, too, which on the CPU changes nothing."""
    trainer = trainer_of(base, overlap=True)
    resume = wrap(trainer, str(base), async_save=True)
    io = trainer.strategy.checkpoint_io
    assert isinstance(io, AsyncFinalizableCheckpointIO)
    (finalizer,) = (each for each in trainer.callbacks if isinstance(each, AsyncFinalizerCallback))
    told: list[int] = []
    for step in (1, 2, 3):
        save(trainer, version(base, step), step, finalize_fn=lambda step=step: told.append(step))
        finalizer.on_train_batch_end(trainer)
        assert told == list(range(1, step)), "a save is finalized before the next one"
    finalizer.on_train_end(trainer)
    assert told == [1, 2, 3]
    # The user's are synchronous, and stay so.
    folder = shared("long-term-beside-async")
    save(trainer, folder, 9)
    assert (folder / "weights" / "metadata.json").is_file()
    assert resume.get_trainer_ckpt_path() == version(base, 3)
    check_load(trainer, version(base, 3), 3)
    finish(trainer)


def both_asynchronous(base: Path) -> None:
    """Ours do not wait in the queue of the long-term ones, which here are not let end."""
    trainer = trainer_of(base, user_async=True)
    theirs = trainer.strategy.checkpoint_io
    assert type(theirs) is AsyncFinalizableCheckpointIO
    expected = theirs.checkpoint_io.save_sharded_strategy
    resume = wrap(trainer, str(base), async_save=True)
    assert trainer.strategy.checkpoint_io.checkpoint_io.save_sharded_strategy is expected
    folder = shared("long-term-async")
    ended: list[str] = []
    save(trainer, folder, 5, finalize_fn=lambda: ended.append("long-term"))
    assert theirs.async_calls_queue.get_num_unfinalized_calls() == 1
    for step in (5, 6):
        save(trainer, version(base, step), step, finalize_fn=lambda step=step: ended.append(str(step)))
    assert ended == ["5"], "ours are finalized while the long-term one is queued"
    settle(trainer)
    assert resume.get_trainer_ckpt_path() == version(base, 6), "committed without being finalized"
    assert theirs.async_calls_queue.get_num_unfinalized_calls() == 1
    assert trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)
    assert sorted(ended) == ["5", "6", "long-term"]
    assert (folder / "weights" / "metadata.json").is_file()
    check_load(trainer, folder, 5)
    check_load(trainer, version(base, 6), 6)
    finish(trainer)


def failing(base: Path) -> None:
    """A save that fails on one rank is told on all, nothing is raised into the training, and the next one is good."""
    trainer = trainer_of(base)
    resume = wrap(trainer, str(base), async_save=True)
    io = flashpoint_io_of(trainer)
    assert io is not None

    def no_room(*args: Any, **options: Any) -> None:
        raise CapacityError("played")

    commit = Save.commit
    for step in (1, 2, 3):
        if step == 2 and rank() == 1:
            Save.commit = no_room  # type: ignore[method-assign]
        save(trainer, version(base, step), step)
        trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)
        Save.commit = commit  # type: ignore[method-assign]
        assert (io.save_strategy.last_error is not None) == (step == 2)
        settle(trainer)
        assert resume.get_trainer_ckpt_path() == version(base, 1 if step == 2 else step)
    check_load(trainer, version(base, 3), 3)
    finish(trainer)


# ---- where to go on from --------------------------------------------------------------------------------------


def auto_resume(base: Path) -> None:
    folder = shared("runs")
    if rank() == 0:
        (folder / "model--last" / "weights").mkdir(parents=True)
        (folder / "model--last" / "context").mkdir(parents=True)
    dist.barrier()
    default = nl.AutoResume(resume_from_directory=str(folder), resume_if_exists=True, resume_ignore_no_checkpoint=True)
    trainer = trainer_of(base)
    resume = wrap(trainer, str(base), async_save=False, default_auto_resume=default)
    assert isinstance(resume, nl.AutoResume)
    assert (resume.resume_from_directory, resume.resume_if_exists) == (str(folder), True)
    # Nothing in memory: what the user's own finds.
    assert resume.get_trainer_ckpt_path() == default.get_trainer_ckpt_path() == folder / "model--last" / "weights"
    assert resume.get_context_path() == folder / "model--last" / "context"
    save(trainer, version(base, 4), 4)
    assert resume.get_trainer_ckpt_path() == version(base, 4)
    assert resume.get_context_path() == folder / "model--last" / "context", "ours was saved without"
    resume.setup(trainer)
    assert trainer.ckpt_path == version(base, 4)
    # Another base container, though its path begins like this one's, has nothing to do with it.
    io = flashpoint_io_of(trainer)
    assert io is not None
    assert io.engine.holds(version(base, 4))
    for other in (
        f"{base}-2/step-4_ckpt",
        f"{base}/sub/step-4_ckpt",
        base,
        f"{base}/model--last",
        "s3://b/step-4_ckpt",
    ):
        assert not io.engine.holds(other), other
    # A node that is replaced gets everything back, common state included.
    assert io.engine.wait(60)
    dist.barrier()
    finish(trainer)
    if rank() == 1:
        shutil.rmtree(base)
    dist.barrier()
    trainer = trainer_of(base)
    resume = wrap(trainer, str(base), async_save=False, default_auto_resume=default)
    assert resume.get_trainer_ckpt_path() == version(base, 4)
    check_load(trainer, version(base, 4), 4)
    finish(trainer)


def context(base: Path) -> None:
    """The file that holds the context goes with the version, to a node that lost it, too."""
    trainer = trainer_of(base)
    resume = wrap(trainer, str(base), async_save=False, always_save_context=True)
    io = flashpoint_io_of(trainer)
    assert io is not None
    assert io.always_save_context
    attach(trainer)
    save(trainer, version(base, 1), 1)
    path = resume.get_context_path()
    assert path is not None
    assert (path / "io.json").is_file()
    assert (path / "model.yaml").is_file()
    finish(trainer)
    if rank() == 0:
        shutil.rmtree(base)
    dist.barrier()
    trainer = trainer_of(base)
    resume = wrap(trainer, str(base), async_save=False)
    path = resume.get_context_path()
    assert path is not None
    assert (path / "io.json").is_file()
    # What lies in its place is removed, if it is a link, and what that leads to is left alone.
    victim = base.parent / "victim"
    victim.mkdir()
    (victim / "io.json").write_text("precious")
    shutil.rmtree(path)
    path.symlink_to(victim)
    assert resume.get_context_path() == path
    assert not path.is_symlink()
    assert (path / "model.yaml").is_file()
    assert [each.read_text() for each in victim.iterdir()] == ["precious"]
    finish(trainer)


def callback(base: Path) -> None:
    """Every second step, but for every fourth; what Lightning puts into a checkpoint is its common state."""
    trainer = trainer_of(base, every=2, skip_every_n_steps=4, strategy=Strategy)
    ours = trainer.callbacks[0]
    resume = wrap(trainer, str(base), async_save=True)
    attach(trainer)
    ours.on_train_start(trainer, trainer.lightning_module)
    found = []
    for step in range(1, 8):
        # What the loop counts when the optimizer has stepped.
        trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        assert trainer.global_step == step
        for _ in range(2):  # the second time as in a batch whose gradients are accumulated
            ours.on_train_batch_end(trainer, trainer.lightning_module, None, None, step)
        settle(trainer)
        found.append(resume.get_trainer_ckpt_path())
    assert found == [None, *([version(base, 2)] * 4), *([version(base, 6)] * 2)]
    check_load(trainer, version(base, 6), 6)
    loaded = trainer.strategy.checkpoint_io.load_checkpoint(str(version(base, 6)), sharded_state_dict={})
    assert loaded["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"][
        "total"
    ] == {
        "ready": 0,
        "completed": 6,
    }
    finish(trainer)


def ending(base: Path) -> None:
    """At a planned end versions go from all nodes if the recipe says so, and training may start anew."""
    for keep, step in ((True, 3), (False, 4)):
        trainer = trainer_of(base, keep_mlf_checkpoint_on_train_end=keep)
        resume = wrap(trainer, str(base), async_save=True, use_optimized_save=True, use_cached_ckpt_structure=False)
        assert resume.get_trainer_ckpt_path() == (None if keep else version(base, 3))
        trainer.callbacks[0].on_train_start(trainer, None)
        save(trainer, version(base, step), step)
        for each in [*trainer.callbacks[1:], trainer.callbacks[0]]:
            each.on_train_end(trainer, None)
        assert version(base, step).exists() is keep
        assert resume.get_trainer_ckpt_path() == (version(base, 3) if keep else None)
        finish(trainer)
    size = sum(path.stat().st_blocks * 512 for path in base.rglob("*"))
    assert size < state_of(0)["state_dict"]["weight"].data.nbytes + 100_000, "the memory is free"


def forgetting_to_ask(base: Path) -> None:
    """A later run that does not use the AutoResume that it was given does not overwrite what there is."""
    trainer = trainer_of(base)
    wrap(trainer, str(base), async_save=True)
    save(trainer, version(base, 60), 60)
    settle(trainer)
    finish(trainer)

    trainer = trainer_of(base)
    resume = wrap(trainer, str(base), async_save=True)
    attach(trainer)
    with pytest.raises(UnaskedVersionsError, match=r"call setup\(\) of what wrap_trainer"):
        trainer.callbacks[0].on_train_start(trainer, trainer.lightning_module)
    assert resume.get_trainer_ckpt_path() == version(base, 60)
    trainer.callbacks[0].on_train_start(trainer, trainer.lightning_module)
    finish(trainer)


# ---- wrapping -------------------------------------------------------------------------------------------------


def wrapping_twice(base: Path) -> None:
    trainer = trainer_of(base)
    default = nl.AutoResume()
    first = wrap(trainer, str(base), async_save=True, default_auto_resume=default)
    io, count = trainer.strategy.checkpoint_io, len(trainer.callbacks)
    second = wrap(trainer, str(base), async_save=True, default_auto_resume=first)
    assert trainer.strategy.checkpoint_io is io
    assert len(trainer.callbacks) == count
    assert isinstance(second, MLFlashpointAutoResume)
    assert second.default is default
    assert second.engine is first.engine
    trainer.callbacks[0].base = trainer.callbacks[0].base.create_child(str(base), "other")
    with pytest.raises(InvalidArgumentError, match="is not that with which this trainer was wrapped before"):
        wrap(trainer, f"{base}/other", async_save=True)
    finish(trainer)


def the_page(base: Path) -> None:
    """The block of docs/nemo.md, in two parts: the reader makes the trainer between them."""
    block = (
        (REPOSITORY / "docs" / "nemo.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    )
    first, mark, second = block.replace("/dev/shm/mlf-jobs/job-145", str(base)).partition("# 3. With the trainer made")
    assert mark
    default, given = nl.AutoResume(), list[object]()

    def yours(restore: object) -> nl.AutoResume:
        given.append(restore)
        return default

    names: dict[str, Any] = {
        "callbacks": [],
        "args": SimpleNamespace(ckpt_mlf_every_n_steps=1, ckpt_std_every_n_steps=100, sync_save=False),
        "nemo": SimpleNamespace(lightning=SimpleNamespace(AutoResume=yours)),
    }
    exec(first, names)
    names["trainer"] = trainer = trainer_with(names["callbacks"])
    exec(mark + second, names)
    assert given == [...]
    assert names["auto_resume"].default is default
    assert names["auto_resume"].get_trainer_ckpt_path() is None
    save(trainer, version(base, 1), 1)
    settle(trainer)
    assert names["auto_resume"].get_trainer_ckpt_path() == version(base, 1)
    check_load(trainer, version(base, 1), 1)
    finish(trainer)


def disabled(base: Path) -> None:
    trainer = trainer_of(base, enabled=False)
    theirs, default = trainer.strategy.checkpoint_io, nl.AutoResume()
    assert wrap(trainer, str(base), async_save=True, default_auto_resume=default) is default
    assert trainer.strategy.checkpoint_io is theirs
    assert not base.exists()
    trainer.callbacks[0].on_train_start(trainer, None)


def refusals(base: Path) -> None:
    def refused(text: str, trainer: Any, path: object = str(base), **options: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            wrap(trainer, path, **{"async_save": True, **options})  # type: ignore[arg-type]

    trainer = trainer_of(base)
    plain = nl.Trainer(accelerator="cpu", devices=world_size(), strategy=DDPStrategy(), logger=False)
    refused("must have NeMo's MegatronStrategy", plain)
    fsdp = trainer_of(base, strategy=functools.partial(MegatronStrategy, fsdp="megatron"))
    refused("has FSDP, whose optimizer state", fsdp)
    refused("must be an absolute path", trainer, "relative")
    refused("is not that of the callback", trainer, f"{base}-2")
    refused("must be True or False", trainer, async_save=1)
    refused("must be nemo.lightning's AutoResume", trainer, default_auto_resume="last")
    with pytest.raises(InvalidArgumentError, match="is not the base container of this trainer's CheckpointIO"):
        trainer.callbacks[0].on_train_start(trainer, None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    without_cuda()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel()
    go_through(sys.argv[1:], lambda name: globals()[name](base_path() / name))
    leave()
