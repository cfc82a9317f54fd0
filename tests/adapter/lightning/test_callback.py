"""The callback in trainers of one process: schedule, neighbours, switching off, refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
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


def recovered(ours: FlashpointCallback) -> tuple[str, str | None]:
    """Where the newest training went on from, and at which version."""
    assert ours.flashpoint is not None
    recovery = ours.flashpoint.last_recovery
    assert recovery is not None
    return recovery.source, recovery.version


@pytest.mark.parametrize(
    ("every", "skip", "options", "expected"),
    [
        (2, None, {}, [2, 4, 7, 8]),  # epochs of six batches, each followed by validation, at whose ends none is made
        (2, 4, {"limit_val_batches": 0}, [2, 7]),
        (1, None, {"accumulate_grad_batches": 2, "max_steps": 5}, [1, 2, 4]),
        (3, None, {"optimizers": 2, "max_steps": 12}, [4, 6, 10]),  # each of which counts steps
        (1, None, {"limit_train_batches": 1, "max_steps": 8}, [3, 6]),
    ],
)
def test_which_steps_are_saved(
    tmpfs: Path, tmp_path: Path, every: int, skip: int | None, options: dict[str, Any], expected: list[int]
) -> None:
    ours = FlashpointCallback(tmpfs / "job", every, skip, strict=True)
    saves, model = Saves(ours), Model(optimizers=options.pop("optimizers", 1))
    fit(tmp_path, ours, callbacks=[saves], model=model, **options)
    assert saves.seen == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_model_checkpoint_goes_on(
    tmpfs: Path, tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ml_flashpoint")
    plugins = [AsyncCheckpointIO()] if asynchronous else []
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    ours = FlashpointCallback(tmpfs / "job", 2, strict=True)
    trainer = fit(tmp_path, ours, callbacks=[checkpoints], enable_checkpointing=True, plugins=plugins)
    assert trainer.callbacks[-1] is ours
    assert trainer.checkpoint_callback is checkpoints
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


def test_validation_from_memory(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    trained = Model()
    fit(tmp_path, ours, max_steps=4, model=trained)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=[ours])
    model = Model()
    trainer.validate(model, DataLoader(torch.zeros(1, 1)), ckpt_path=resume_path(trainer), verbose=False)
    assert torch.equal(model.layer.weight, trained.layer.weight)


def test_disabled_it_does_nothing(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", enabled=False)
    trainer = fit(tmp_path, ours, path=None)
    assert ours.flashpoint is None
    assert not (tmpfs / "job").exists()
    assert resume_path(trainer, fallback="last") == "last"


class Ends(Callback):
    """Ends a training in the middle of a step."""

    def __init__(self, how: Callable[[], None]) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            self.how()


def _fail() -> None:
    raise RuntimeError("as it happens")


@pytest.mark.parametrize("how", ["failure", "SIGTERM"])
def test_a_training_that_is_ended_keeps_its_last_step(tmpfs: Path, tmp_path: Path, how: str) -> None:
    """SIGTERM is left to Lightning, which ends the batch first; so does the save that the batch began."""
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    before = signal.getsignal(signal.SIGTERM)
    end = _fail if how == "failure" else lambda: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SIGTERMException if how == "SIGTERM" else RuntimeError):
        fit(tmp_path, ours, callbacks=[Ends(end)])
    signal.signal(signal.SIGTERM, before)
    fit(tmp_path, ours, max_steps=9)
    assert recovered(ours)[1] == ("step-5_ckpt" if how == "SIGTERM" else "step-4_ckpt")


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


def test_callback_states_that_lightning_could_not_copy_are_refused_and_others_come_back(
    tmpfs: Path, tmp_path: Path
) -> None:
    refused = [_nested(), torch.ones(3, 3).to_mkldnn(), torch.eye(3).to_sparse_csr()]
    for number, kept in enumerate(refused):
        ours = FlashpointCallback(tmpfs / f"refused-{number}", 2)
        fit(tmp_path, ours, callbacks=[Keeps(kept)], max_steps=3)
        assert ours.flashpoint is not None
        assert "'callbacks.Keeps.inner.0.kept' is a" in str(ours.flashpoint.health.last_error)
        assert list((tmpfs / f"refused-{number}").glob("step-*")) == []
    for number, kept in enumerate([_nested(layout=torch.jagged), torch.eye(3).to_sparse()]):
        keeps = Keeps(torch.zeros(1))
        for callback, max_steps in ((Keeps(kept), 3), (keeps, 5)):
            ours = FlashpointCallback(tmpfs / f"kept-{number}", 2, strict=True)
            fit(tmp_path, ours, callbacks=[callback], max_steps=max_steps)
        dense = [each.to_padded_tensor(0.0) if each.is_nested else each.to_dense() for each in (keeps.kept, kept)]
        assert keeps.kept.layout is kept.layout
        assert torch.equal(*dense)


def test_another_model_or_an_older_version_is_an_error_and_not_a_fresh_start(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    fit(tmp_path, ours, max_steps=4)
    with pytest.raises(RuntimeError, match="size mismatch"):
        fit(tmp_path, ours, model=Model(width=4))
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


def test_bad_arguments_fail_at_once(tmpfs: Path) -> None:
    bad = {"every_n_steps": 0, "skip_every_n_steps": -1, "enabled": 1, "grace_s": 0, "base": "a", "persist_every": 0}
    for name, value in bad.items():
        with pytest.raises(InvalidArgumentError, match=name):
            FlashpointCallback(**{"base": "/dev/shm/never", "persist": "memory://any", name: value})
    with pytest.raises(InvalidArgumentError, match="must have one FlashpointCallback"):
        resume_path(Trainer(accelerator="cpu", logger=False))
    with pytest.raises(FlashpointError, match="not training"):
        FlashpointCallback(tmpfs / "job").save(Trainer(accelerator="cpu", logger=False))
    ours = FlashpointCallback(tmpfs / "job")
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, callbacks=[ours])
    with pytest.raises(InvalidArgumentError, match="start all processes with torchrun"):
        resume_path(trainer)


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
    with pytest.raises(InvalidArgumentError, match="EMAWeightAveraging keeps an unsharded model"):
        check_trainer(_trainer(ModelParallelStrategy(), EMAWeightAveraging()))
    unsupported: Any = SimpleNamespace(strategy=object(), callbacks=[])
    with pytest.raises(InvalidArgumentError, match="must be one of"):
        check_trainer(unsupported)
