"""The callback in trainers of one process: schedule, neighbours, switching off, refusals."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from ml_flashpoint.adapter.lightning import FlashpointCallback, resume_path
from ml_flashpoint.adapter.lightning.engine import check_trainer
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, LoadError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Model(LightningModule):
    def __init__(self, width: int = 3, optimizers: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
        self.width, self.optimizers_wanted = width, optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(torch.ones(2, self.width)).square().mean()
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(loss, retain_graph=True)
                optimizer.step()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", torch.tensor(1.0))

    def configure_optimizers(self) -> Any:
        made = [torch.optim.Adam(self.parameters(), lr=0.01) for _ in range(self.optimizers_wanted)]
        return made[0] if self.automatic_optimization else made


class Saves(Callback):
    """The steps that were saved, as seen from the next."""

    def __init__(self, ours: FlashpointCallback) -> None:
        self.ours, self.seen = ours, list[int]()

    def on_train_batch_start(self, *args: Any) -> None:
        engine = self.ours.flashpoint
        assert engine is not None
        assert engine.wait(60)
        if engine.last_saved is not None and engine.last_saved not in self.seen:
            self.seen.append(engine.last_saved)


class _Waits(Callback):
    """Has every version verified: no step is as long as that takes."""

    def __init__(self, ours: FlashpointCallback) -> None:
        self.ours = ours

    def on_train_batch_start(self, *args: Any) -> None:
        if self.ours.flashpoint is not None:
            assert self.ours.flashpoint._checkpointer.wait(60)


def fit(
    folder: Path,
    ours: FlashpointCallback | None,
    *,
    callbacks: Any = (),
    model: Any = None,
    path: Any = "memory",
    batches: Any = None,
    **o: Any,
) -> Trainer:
    options: dict[str, Any] = {"max_steps": 10, "enable_checkpointing": False, "max_epochs": -1, **o}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[*([ours, _Waits(ours)] if ours else []), *callbacks],
        **options,
    )
    if path == "memory":
        path = resume_path(trainer) if ours else None
    elif callable(path):
        path = path(trainer)
    batches = DataLoader(torch.zeros(6, 1)) if batches is None else batches
    trainer.fit(model or Model(), batches, DataLoader(torch.zeros(1, 1)), ckpt_path=path)
    return trainer


def saved_steps(tmpfs: Path, tmp_path: Path, every: int, skip: int | None = None, **options: Any) -> list[int]:
    ours = FlashpointCallback(tmpfs / "job", every, skip, strict=True)
    saves = Saves(ours)
    fit(tmp_path, ours, callbacks=[saves], **options)
    return saves.seen


# ---- when -----------------------------------------------------------------------------------------------------


def test_every_so_many_steps_but_for_the_ends_of_epochs(tmpfs: Path, tmp_path: Path) -> None:
    # Epochs of six batches, each followed by validation.
    assert saved_steps(tmpfs, tmp_path, 2) == [2, 4, 7, 8]


def test_skip_interval(tmpfs: Path, tmp_path: Path) -> None:
    assert saved_steps(tmpfs, tmp_path, 2, 4, limit_val_batches=0) == [2, 7]


def test_not_while_gradients_are_accumulated(tmpfs: Path, tmp_path: Path) -> None:
    ours = saved_steps(tmpfs, tmp_path, 1, accumulate_grad_batches=2, max_steps=5)
    assert ours == [1, 2, 4]


def test_several_optimizers_count_several_steps(tmpfs: Path, tmp_path: Path) -> None:
    assert saved_steps(tmpfs, tmp_path, 3, model=Model(optimizers=2), max_steps=12) == [4, 6, 10]


def test_epochs_of_one_batch_are_saved_nevertheless(tmpfs: Path, tmp_path: Path) -> None:
    assert saved_steps(tmpfs, tmp_path, 1, limit_train_batches=1, max_steps=8) == [3, 6]


# ---- beside others --------------------------------------------------------------------------------------------


def test_goes_behind_all_others(tmpfs: Path, tmp_path: Path) -> None:
    ours, checkpoints = FlashpointCallback(tmpfs / "job"), ModelCheckpoint(tmp_path)
    trainer = fit(tmp_path, ours, callbacks=[checkpoints], enable_checkpointing=True)
    assert trainer.callbacks[-1] is ours
    assert trainer.checkpoint_callback is checkpoints


@pytest.mark.parametrize("asynchronous", [False, True])
def test_model_checkpoint_goes_on(
    tmpfs: Path, tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ml_flashpoint")
    plugins = [AsyncCheckpointIO()] if asynchronous else []
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    ours = FlashpointCallback(tmpfs / "job", 2, strict=True)
    fit(tmp_path, ours, callbacks=[checkpoints], enable_checkpointing=True, plugins=plugins)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]
    held = torch.load(tmp_path / "step=9.ckpt", weights_only=False)
    assert held["global_step"] == 9
    assert "ml_flashpoint" not in held
    # And is what is gone on from, if memory has nothing.
    other = FlashpointCallback(tmpfs / "other")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[other])
    path = resume_path(trainer, fallback=tmp_path / "step=9.ckpt")
    assert path == tmp_path / "step=9.ckpt"
    assert f"no version in {tmpfs / 'other'}: on from {path}" in caplog.messages
    assert fit(tmp_path, other, path=path, max_steps=12).global_step == 12


def test_a_second_fit_goes_on_from_the_first(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    fit(tmp_path, ours, max_steps=4)
    engine = ours.flashpoint
    assert engine is not None
    trainer = fit(tmp_path, ours, max_steps=9)
    assert ours.flashpoint is not engine
    assert ours.flashpoint is not None
    assert ours.flashpoint.last_recovery is not None
    assert ours.flashpoint.last_recovery.version == "step-4_ckpt"
    assert trainer.global_step == 9


def test_validation_from_memory(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    trained = Model()
    fit(tmp_path, ours, max_steps=4, model=trained)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=[ours])
    model = Model()
    trainer.validate(model, DataLoader(torch.zeros(1, 1)), ckpt_path=resume_path(trainer), verbose=False)
    assert torch.equal(model.layer.weight, trained.layer.weight)


# ---- switched off, and off the path ---------------------------------------------------------------------------


def test_disabled_it_does_nothing(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", enabled=False)
    trainer = fit(tmp_path, ours, path=None)
    assert ours.flashpoint is None
    assert not (tmpfs / "job").exists()
    assert resume_path(trainer, fallback="last") == "last"


def test_failing_training_keeps_what_was_saved(tmpfs: Path, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 5:
                raise RuntimeError("as it happens")

    ours = FlashpointCallback(tmpfs / "job", strict=True)
    with pytest.raises(RuntimeError, match="as it happens"):
        fit(tmp_path, ours, callbacks=[Fails()])
    fit(tmp_path, ours, max_steps=9)
    assert ours.flashpoint is not None
    assert ours.flashpoint.last_recovery is not None
    assert ours.flashpoint.last_recovery.version == "step-5_ckpt"


def test_sigterm_is_left_to_lightning_and_the_last_step_is_kept(tmpfs: Path, tmp_path: Path) -> None:
    class Terminates(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    ours = FlashpointCallback(tmpfs / "job", strict=True)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        fit(tmp_path, ours, callbacks=[Terminates()])
    signal.signal(signal.SIGTERM, before)
    # The batch was ended, and the save that it began, too.
    fit(tmp_path, ours, max_steps=9)
    assert ours.flashpoint is not None
    assert ours.flashpoint.last_recovery is not None
    assert ours.flashpoint.last_recovery.version == "step-5_ckpt"


class Keeps(Callback):
    """Has a tensor in its state."""

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"plain": torch.ones(2), "inner": [{"kept": self.kept}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["inner"][0]["kept"]


def _nested(**layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **layout)


@pytest.mark.parametrize("made", [_nested, lambda: torch.ones(3, 3).to_mkldnn(), lambda: torch.eye(3).to_sparse_csr()])
def test_what_lightning_could_not_restore_is_refused_when_it_is_saved(tmpfs: Path, tmp_path: Path, made: Any) -> None:
    """It gives callbacks copies of their states, and there is none of these tensors."""
    ours = FlashpointCallback(tmpfs / "job", 2)
    fit(tmp_path, ours, callbacks=[Keeps(made())])
    assert ours.flashpoint is not None
    assert "'callbacks.Keeps.inner.0.kept' is a" in str(ours.flashpoint.health.last_error)
    assert list((tmpfs / "job").glob("step-*")) == []


@pytest.mark.parametrize("made", [lambda: _nested(layout=torch.jagged), lambda: torch.eye(3).to_sparse()])
def test_what_lightning_can_restore_comes_back(tmpfs: Path, tmp_path: Path, made: Any) -> None:
    fit(tmp_path, FlashpointCallback(tmpfs / "job", 2, strict=True), callbacks=[Keeps(made())])
    keeps = Keeps(torch.zeros(1))
    fit(tmp_path, FlashpointCallback(tmpfs / "job", 2, strict=True), callbacks=[keeps], max_steps=12)
    dense = [each.to_padded_tensor(0.0) if each.is_nested else each.to_dense() for each in (keeps.kept, made())]
    assert keeps.kept.layout is made().layout
    assert torch.equal(*dense)


def test_other_model_is_an_error_and_not_a_fresh_start(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    fit(tmp_path, ours, max_steps=4)
    with pytest.raises(RuntimeError, match="size mismatch"):
        fit(tmp_path, ours, model=Model(width=4))


def test_only_the_newest_version_can_be_loaded(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    fit(tmp_path, ours, max_steps=4)
    with pytest.raises(LoadError, match="the newest is step-4_ckpt"):
        fit(tmp_path, ours, path=f"{tmpfs}/job/step-2_ckpt")


def test_paths_that_only_begin_like_the_base_are_not_ours(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[ours])
    engine = ours.open(trainer)
    try:
        assert engine.holds(f"{tmpfs}/job/step-2_ckpt")
        for other in ("job-2/step-2_ckpt", "job/sub/step-2_ckpt", "job/best.ckpt", "job", "job/../other/step-2_ckpt"):
            assert not engine.holds(f"{tmpfs}/{other}"), other
        for other in ("s3://bucket/step-2_ckpt", "step-2_ckpt", None, 5):
            assert not engine.holds(other), other
    finally:
        engine.close()


# ---- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_steps": 0},
        {"every_n_steps": 1.5},
        {"every_n_steps": "often"},
        {"skip_every_n_steps": -1},
        {"enabled": 1},
        {"grace_s": 0},
        {"base": "not/absolute"},
        {"deadline_s": "long"},
    ],
)
def test_bad_arguments_fail_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        FlashpointCallback(**{"base": "/dev/shm/never", **options})


def test_trainer_without_the_callback() -> None:
    with pytest.raises(InvalidArgumentError, match="must have one FlashpointCallback"):
        resume_path(Trainer(accelerator="cpu", logger=False))


def _trainer(strategy: Any, *callbacks: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=2, logger=False, strategy=strategy, callbacks=[*callbacks])


def test_strategies() -> None:
    class Special(DDPStrategy):
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    assert not check_trainer(Trainer(accelerator="cpu", logger=False, strategy=SingleDeviceStrategy("cpu")))
    assert not check_trainer(_trainer(DDPStrategy()))
    assert check_trainer(_trainer(ModelParallelStrategy()))
    with pytest.raises(InvalidArgumentError, match="has its own load_checkpoint"):
        check_trainer(_trainer(Special()))
    unsupported: Any = SimpleNamespace(strategy=object(), callbacks=[])
    with pytest.raises(InvalidArgumentError, match="must be one of"):
        check_trainer(unsupported)


def test_weight_averaging_of_shards_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="EMAWeightAveraging keeps an unsharded model"):
        check_trainer(_trainer(ModelParallelStrategy(), EMAWeightAveraging()))


def test_processes_that_lightning_would_start(tmpfs: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job")
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, callbacks=[ours])
    with pytest.raises(InvalidArgumentError, match="start all processes with torchrun"):
        resume_path(trainer)


def test_saving_needs_a_training(tmpfs: Path) -> None:
    with pytest.raises(FlashpointError, match="not training"):
        FlashpointCallback(tmpfs / "job").save(Trainer(accelerator="cpu", logger=False))
