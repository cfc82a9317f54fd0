"""What `attach` refuses, and the edges of the way back. Whole jobs that are killed: tests/e2e/test_hugging_face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from ml_flashpoint import Flashpoint, open_version
from ml_flashpoint.adapter.transformers import resume_path
from ml_flashpoint.adapter.transformers.attached import attach as attach_and_leave
from ml_flashpoint.format.errors import InvalidArgumentError, UnaskedVersionsError

pytestmark = pytest.mark.slow


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(x)
        return {"loss": (found - labels[:, None]).square().mean(), "logits": found}


def trainer_of(output: Path, **options: Any) -> Any:
    torch.manual_seed(3)
    args = transformers.TrainingArguments(
        output_dir=str(output),
        **{
            "per_device_train_batch_size": 2,
            "num_train_epochs": 2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "dataloader_pin_memory": False,
        }
        | options,
    )
    data = [{"x": torch.full((4,), float(index)), "labels": float(index)} for index in range(10)]
    return transformers.Trainer(Linear(), args, train_dataset=data, eval_dataset=data[:2])


_open: list[Flashpoint] = []


def attach(trainer: Any, base: Path, **options: Any) -> Any:
    attach_and_leave(trainer, base, **options)
    _open.append(trainer._ml_flashpoint.flashpoint)
    return trainer


@pytest.fixture
def base(tmpfs: Path) -> Iterator[Path]:
    yield tmpfs / "job"
    while _open:
        _open.pop().close()


def test_a_finished_run_trains_no_step_more(base: Path, tmp_path: Path) -> None:
    for stops in ({"max_steps": 7}, {}):
        first = attach(trainer_of(tmp_path, **stops), base / str(len(stops)), strict=True)
        first.train(resume_from_checkpoint=resume_path(first))
        weights = first.model.layer.weight.clone()
        again = attach(trainer_of(tmp_path, **stops), base / str(len(stops)), strict=True)
        again.train(resume_from_checkpoint=resume_path(again))
        assert again.state.global_step == first.state.global_step
        assert torch.equal(again.model.layer.weight, weights)


def test_more_epochs_go_on_from_the_end_of_the_last_and_what_is_kept_of_the_data_does_not_grow(
    base: Path, tmp_path: Path
) -> None:
    constant = {"lr_scheduler_type": "constant"}
    first = attach(trainer_of(tmp_path, **constant), base, strict=True)
    first.train(resume_from_checkpoint=resume_path(first))
    on = attach(trainer_of(tmp_path, num_train_epochs=4, **constant), base, strict=True)
    on.train(resume_from_checkpoint=resume_path(on))
    whole = trainer_of(tmp_path, num_train_epochs=4, **constant)
    whole.train()
    assert torch.equal(on.model.layer.weight, whole.model.layer.weight)
    for at in (11, 15, 20):
        assert len(on._ml_flashpoint.draws.state_after(at)["fetched"]) <= 2


def test_patience_comes_back(base: Path, tmp_path: Path) -> None:
    """Of callbacks that have a state, without the Trainer's option for it."""

    def trained_to(max_steps: int) -> int:
        """Nothing gets better where nothing is learned."""
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_strategy": "best"}
        steps = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": max_steps}
        trainer = trainer_of(tmp_path, learning_rate=0.0, **best, **steps)
        trainer.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=4))
        attach(trainer, base, strict=True)
        trainer.train(resume_from_checkpoint=resume_path(trainer))
        return int(trainer.state.global_step)

    assert trained_to(3) == 3
    assert trained_to(9) == 5, "the first evaluation was the best, and four were no better"
    assert trained_to(9) == 5, "it stays ended"


def test_versions_must_be_asked_for_taken_or_discarded(base: Path, tmp_path: Path) -> None:
    attach(trainer_of(tmp_path, max_steps=2), base, strict=True).train()
    with pytest.raises(UnaskedVersionsError, match="resume_path"):
        attach(trainer_of(tmp_path), base).train()
    _open.pop().close()
    other = attach(trainer_of(tmp_path), base)
    assert resume_path(other) is not None
    with pytest.raises(InvalidArgumentError, match="resume_path"):
        other.train()
    _open.pop().close()
    trainer = attach(trainer_of(tmp_path, max_steps=3), base, discard_existing=True, strict=True)
    trainer.train()
    assert resume_path(trainer) is not None
    assert trainer._ml_flashpoint.step_found == 3, "what it has saved itself stays"


def test_the_trainers_own_checkpoint_is_the_fallback(base: Path, tmp_path: Path) -> None:
    own = trainer_of(tmp_path, save_strategy="steps", save_steps=3, max_steps=3)
    assert resume_path(attach(own, base / "none"), fallback=True) is None
    own.train()
    on = attach(trainer_of(tmp_path, max_steps=6), base / "new", strict=True)
    path = resume_path(on, fallback=True)
    assert path == str(tmp_path / "checkpoint-3")
    on.train(resume_from_checkpoint=path)
    third = attach(trainer_of(tmp_path, max_steps=6), base / "new")
    assert resume_path(third) != path
    assert third._ml_flashpoint.step_found == 6


def test_unusable_arguments_are_named(base: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"trainer"):
        attach(object(), base)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="attach"):
        resume_path(trainer)
    with pytest.raises(InvalidArgumentError, match="every_n_steps"):
        attach(trainer, base, every_n_steps=0)
    with pytest.raises(InvalidArgumentError, match="auto_find_batch_size"):
        attach(trainer_of(tmp_path, auto_find_batch_size=True), base)
    attach(trainer, base)
    with pytest.raises(InvalidArgumentError, match="already"):
        attach(trainer, base)


class Limit(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops a training after a step, as a limit on time does, or an epoch."""

    def __init__(self, step: int, flag: str) -> None:
        self._step, self._flag = step, flag

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            setattr(control, self._flag, True)


def test_what_a_limit_has_stopped_goes_on(base: Path, tmp_path: Path) -> None:
    first = trainer_of(tmp_path)
    first.add_callback(Limit(3, "should_training_stop"))
    attach(first, base, strict=True).train(resume_from_checkpoint=resume_path(first))
    assert first.state.global_step == 3
    on = attach(trainer_of(tmp_path), base, strict=True)
    on.train(resume_from_checkpoint=resume_path(on))
    whole = trainer_of(tmp_path)
    whole.train()
    assert on.state.global_step == whole.state.global_step == 10
    assert torch.equal(on.model.layer.weight, whole.model.layer.weight)


def test_a_version_is_the_step_of_its_name_after_an_epoch_cut_short(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path)
    trainer.add_callback(Limit(3, "should_epoch_stop"))
    attach(trainer, base, strict=True).train()
    assert "was cut short" in caplog.text
    assert trainer.state.global_step == 8
    assert trainer._ml_flashpoint.flashpoint.steps_done in (7, 8)
    with open_version(base) as version:
        assert version.step == 8
        assert torch.equal(version.tensor("model.layer.weight"), trainer.model.layer.weight.detach())
