"""`attach`: have a Trainer save into memory every few steps, and go on from there.

A save is made where nothing of its step is left to do: after logging, evaluation and the Trainer's own save, which come
after ``on_step_end``. At the last step of an epoch, that is after those of the epoch's end.

The way back is the Trainer's own: ``train(resume_from_checkpoint=...)`` reads ``trainer_state.json`` of a folder that
`resume_path` makes in the base container, wraps the model, makes the optimizer, and asks for their states. All of it is
loaded there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from ml_flashpoint.adapter.accelerate.place import Draws, have_new_workers, watch_draws
from ml_flashpoint.adapter.frameworks import FrameworkFlashpoint
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError
from ml_flashpoint.state.random_numbers import capture_rng_state, restore_rng_state

_log = logging.getLogger(__name__)

_ATTACHED = "_ml_flashpoint"
# What a run gives itself, whatever was saved.
_OF_THE_RUN = {
    "is_local_process_zero",
    "is_world_process_zero",
    "is_hyper_param_search",
    "max_steps",
    "num_train_epochs",
}
# The total is the loss since the initial step.
_OF_THE_LOOP = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")


def attach(trainer: Trainer, base: str | os.PathLike[str], *, every_n_steps: int = 1, **options: Any) -> Trainer:
    """Let a Trainer save its state into memory every few optimizer steps.

    ::

        trainer = Trainer(model, args, train_dataset=data)
        attach(trainer, "/dev/shm/mlf-jobs/job-145", every_n_steps=1)
        trainer.train(resume_from_checkpoint=resume_path(trainer))

    A save contains model, optimizer, scheduler, scaler, the state of the Trainer and its callbacks, the loss that is
    not logged yet, and the random number generators. Frozen parameters of a PEFT model are left out, as the Trainer
    does. The Trainer's own checkpoints keep working.

    Random numbers that samples and collators draw in the main process are the same after a restart. Workers
    (``dataloader_num_workers``) draw different ones after a restart within an epoch.

    Args:
        trainer: any Trainer, before ``train``: plain, with DDP or FSDP2, or a subclass such as ``SFTTrainer``.
        base, every_n_steps, options: see `ml_flashpoint.Flashpoint`.

    Returns:
        The Trainer.

    Raises:
        InvalidArgumentError: a Flashpoint is attached already, a feature of the Trainer is not supported, or an
            argument is invalid.
        FlashpointError: the base container cannot be used.
    """
    if not isinstance(trainer, Trainer):
        raise InvalidArgumentError("must be a transformers.Trainer", argument="trainer", value=trainer)
    if hasattr(trainer, _ATTACHED):
        raise InvalidArgumentError("has a Flashpoint attached already", argument="trainer", value=trainer)
    kind = trainer.accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.FSDP) and "MULTI" not in kind.value:
        raise InvalidArgumentError(f"{kind.value} is not supported", argument="trainer", value=trainer)
    if trainer.args.auto_find_batch_size:
        text = "auto_find_batch_size is not supported: a place in the data is counted in batches"
        raise InvalidArgumentError(text, argument="trainer", value=trainer)
    attached = _Attached(trainer, base, every_n_steps, options)
    setattr(trainer, _ATTACHED, attached)
    trainer.add_callback(attached)
    return trainer


def resume_path(trainer: Trainer, fallback: str | bool | None = None) -> str | None:
    """Return the path to resume from, for ``trainer.train(resume_from_checkpoint=...)``. Collective.

    Args:
        trainer: has a Flashpoint attached.
        fallback: what to return where there is no version: a checkpoint of the Trainer's own, True for the newest one
            in its ``output_dir``, if there is one, or None to start anew.

    Returns:
        A folder in the base container that stands for the newest version which all ranks can load; or the fallback.

    Raises:
        InvalidArgumentError: nothing is attached.
        NothingLoadableError: there are versions, none can be loaded, and there is no fallback.
        FlashpointError: ranks lost each other.
    """
    attached = getattr(trainer, _ATTACHED, None)
    if attached is None:
        raise InvalidArgumentError("has no Flashpoint: call attach() first", argument="trainer", value=trainer)
    if fallback is True:
        folder = trainer.args.output_dir
        fallback = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    path: str | None = attached.find(fallback or None)
    return path or fallback or None


class TrainerFlashpoint(FrameworkFlashpoint):
    """A `Flashpoint` for one ``train()`` of a Trainer."""

    def begin(self, step: int, *, asked: bool) -> None:
        """Begin to save, after so many steps, where nothing of the base container was loaded. Collective.

        Raises:
            UnaskedVersionsError: there are versions, and nobody has asked for them.
        """
        if not asked:
            self._checkpointer.check_usable("resume_path(trainer)", hint="or attach with discard_existing=True")
        self.resume(fallback=lambda: step)

    @property
    def place(self) -> Path:
        """A folder in the base container for what this rank's Trainer reads of a version."""
        return Path(self._checkpointer.base) / "trainer" / f"rank-{self._ranks.rank:05d}"


class _Attached(TrainerCallback):  # type: ignore[misc]
    """Stands between a Trainer and its `TrainerFlashpoint`: takes the place of some of the Trainer's methods.

    Attributes:
        flashpoint: of the latest ``train()``.
        step_found: of the newest version; None if there is none, or nobody has asked.
        generators: the random number generators as a version has them; None unless one was loaded.
        draws: of the loader in use; None where its data is iterable.
    """

    def __init__(
        self, trainer: Trainer, base: str | os.PathLike[str], every_n_steps: int, options: dict[str, Any]
    ) -> None:
        ours: dict[str, Callable[..., Any]] = {
            "get_train_dataloader": self._make_loader,
            "get_eval_dataloader": self._make_eval_loader,
            "_load_from_checkpoint": self._load_nothing_yet,
            "_load_optimizer_and_scheduler": self._load,
            "_load_scaler": self._load_nothing_yet,
            "_load_rng_state": self._restore_generators,
            "_run_epoch": self._run_epoch,
            "_maybe_log_save_evaluate": self._end_step,
        }
        if missing := [name for name in ours if not hasattr(trainer, name)]:
            text = f"transformers {transformers.__version__} has no Trainer.{missing[0]}, which this adapter needs"
            raise InvalidArgumentError(text, argument="trainer", value=trainer, hint="use release 5.24")
        self.trainer = trainer
        self._open = functools.partial(TrainerFlashpoint, base, every_n_steps=every_n_steps, **options)
        self.flashpoint = self._open()
        self._open.keywords["discard_existing"] = False  # which is for the first one only
        self._is_tracking = False
        self._asked = False
        self._path: str | None = None  # what stands for the version that was found
        self.step_found: int | None = None
        self._loaded: dict[str, Any] | None = None
        self._goes_on = False  # in the midst of an epoch, whose batches are left out
        self._logs: list[str] = []  # entries of the log history, which are written once
        self._step = 0
        self._put_off = False
        self._updates = 1  # steps of the optimizer in an epoch
        self._began = 0  # steps done when it began
        self._is_last_epoch = False
        self._has_warned = False
        self.generators: dict[str, Any] | None = None
        self.draws: Draws | None = None
        for name, method in ours.items():
            setattr(trainer, name, functools.partial(method, getattr(trainer, name)))

    # ---- the way back ---------------------------------------------------------------------------------------

    def find(self, fallback: object) -> str | None:
        """Return the path that stands for the newest version; None if there is none to go on from. Collective."""
        self._have_new()
        self._asked = True
        self.step_found = self.flashpoint.newest_step(may_fall_back=fallback is not None)
        if self.step_found is None:
            return None
        self._path = str(self.flashpoint.place)
        os.makedirs(self._path, mode=0o700, exist_ok=True)
        args = self.trainer.args
        state = TrainerState(global_step=self.step_found, train_batch_size=args.train_batch_size)
        state.compute_steps(args, max(args.max_steps, 1))
        state.save_to_json(os.path.join(self._path, TRAINER_STATE_NAME))
        return self._path

    def _have_new(self) -> None:
        """Have a `Flashpoint` that tracks nothing yet: each ``train()`` wraps the model anew."""
        if self._is_tracking or self.flashpoint.is_closed:
            self.flashpoint.close()
            self.flashpoint = self._open()
        self._is_tracking = self._asked = False
        self._path = self.step_found = self.generators = None
        self._loaded = None

    def _track(self) -> None:
        trainer = self.trainer
        if self._is_tracking:
            raise FlashpointError("call resume_path(trainer) before each train()")
        self._is_tracking = True
        model: nn.Module = trainer.model_wrapped
        frozen = any(not parameter.requires_grad for parameter in trainer.model.parameters())
        if frozen and hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            model = Trained(trainer.model)
        optimizer = trainer.optimizer
        self.flashpoint.track(
            model=model,
            optimizer=optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
            scheduler=trainer.lr_scheduler,
            trainer=self,
        )
        if trainer.accelerator.scaler is not None:
            self.flashpoint.track(scaler=trainer.accelerator.scaler)

    def _load_nothing_yet(self, given: Callable[..., None], checkpoint: str, *rest: Any) -> None:
        if checkpoint != self._path:
            given(checkpoint, *rest)

    def _load(self, given: Callable[..., None], checkpoint: str) -> None:
        """Load everything, at the place where a Trainer loads its optimizer: the model is wrapped by then."""
        if checkpoint != self._path:
            given(checkpoint)
            return
        self._track()
        self.flashpoint.resume(step=self.step_found)
        self.generators = capture_rng_state()
        self._apply()

    def _restore_generators(self, given: Callable[..., None], checkpoint: str) -> None:
        """Restore random numbers, after a Trainer has fetched the first batches of what is left of an epoch."""
        if checkpoint != self._path or self.generators is None:
            given(checkpoint)
        elif self.draws is None or not self._goes_on:
            restore_rng_state(self.generators)
        else:
            self.draws.end_going_on()

    def _make_loader(self, given: Callable[[], Any]) -> Any:
        loader = given()
        self.draws = watch_draws(loader)
        return loader

    def _make_eval_loader(self, given: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loader = given(*args, **kwargs)
        have_new_workers(loader)
        return loader

    # ---- training -------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to save."""
        self._step, self._put_off = state.global_step, False
        if self._loaded is not None:
            self._apply_to_loop(self._loaded, control)
            return
        if self.step_found is not None:
            text = "must be what resume_path(trainer) has returned: there is a version in memory"
            raise InvalidArgumentError(text, argument="resume_from_checkpoint", value=None)
        asked = self._asked
        if self._is_tracking or self.flashpoint.is_closed:
            self._have_new()
        self._track()
        self.flashpoint.begin(state.global_step, asked=asked)

    def _run_epoch(self, given: Callable[..., None], **kwargs: Any) -> None:
        control, state = self.trainer.control, self.trainer.state
        self._updates, left_out = kwargs["num_update_steps_per_epoch"], 0
        if kwargs["epoch"] == kwargs["epochs_trained"]:
            left_out = kwargs["steps_trained_in_current_epoch"] // self.trainer.args.gradient_accumulation_steps
        self._began = state.global_step - left_out
        self._is_last_epoch = kwargs["epoch"] + 1 >= state.num_train_epochs
        control.should_training_stop |= state.global_step >= state.max_steps  # of which a Trainer would do one more
        if not control.should_training_stop:
            given(**kwargs)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the step wait for the copy under way."""
        self.flashpoint.before_update()

    def _end_step(self, given: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Save when a step, and the epoch that ends with it, is done in every respect."""
        given(*args, **kwargs)
        control, step = self.trainer.control, self.trainer.state.global_step
        is_of_step, self._step = step != self._step, step
        if is_of_step:
            is_last = step - self._began == self._updates
            if control.should_epoch_stop and not is_last and not self._has_warned:
                self._has_warned = True
                _log.warning("an epoch was cut short: a Trainer that is started again would go on in another one")
            self._put_off = is_last or control.should_epoch_stop or control.should_training_stop
        elif self._put_off:
            self._put_off = False
        else:
            return
        if self._put_off:
            return
        if control.should_training_stop or (self._is_last_epoch and not is_of_step):
            self.flashpoint.save(step)
        else:
            self.flashpoint.step_to(step)

    def given(self) -> int:
        """Return the number of batches of this epoch that are trained on; 0 at its end."""
        done = self.trainer.state.global_step - self._began
        return 0 if done == self._updates else int(done * self.trainer.args.gradient_accumulation_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End saving. Versions stay."""
        self.flashpoint.close()

    # ---- the state besides model, optimizer, scheduler and scaler ---------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Trainer, of its callbacks which have one, and of the loop."""
        trainer, draws, given = self.trainer, self.draws, self.given()
        history = trainer.state.log_history
        del self._logs[len(history) :]
        self._logs += [json.dumps(entry, default=float) for entry in history[len(self._logs) :]]
        fields = {each.name for each in dataclasses.fields(trainer.state)} - _OF_THE_RUN - {"log_history"}
        return {
            "state": {name: getattr(trainer.state, name) for name in sorted(fields)},
            "history": "\n".join(self._logs),
            "callbacks": [(type(each).__name__, each.state()["attributes"]) for each in self._callbacks()],
            "loop": {name: getattr(trainer, name) for name in _OF_THE_LOOP},
            "given": given,
            "draws": None if draws is None else draws.state_after(given),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was loaded."""
        self._loaded = state

    def _apply(self) -> None:
        """Take over what was loaded, before training begins."""
        trainer, draws, loaded = self.trainer, self.draws, self._loaded
        assert loaded is not None
        given = loaded["given"]
        for name, value in loaded["state"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history, self._logs = [json.loads(line) for line in loaded["history"].splitlines()], []
        best = trainer.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):  # on a node that was lost
            trainer.state.best_model_checkpoint = None
        callbacks = self._callbacks()
        for kind, attributes in loaded["callbacks"]:
            callback = next((each for each in callbacks if type(each).__name__ == kind), None)
            if callback is not None:
                callbacks.remove(callback)
                vars(callback).update(attributes)
        self._goes_on = given > 0 and not trainer.args.ignore_data_skip
        if draws is None or loaded["draws"] is None:
            self._goes_on = False
        elif self._goes_on:
            assert self.generators is not None
            draws.go_on(given, loaded["draws"], self.generators)
        else:
            draws.begin_anew(loaded["draws"])

    def _apply_to_loop(self, loaded: dict[str, Any], control: TrainerControl) -> None:
        """Take over what a Trainer sets at the begin of training."""
        for name, value in loaded["loop"].items():
            setattr(self.trainer, name, value)
        # Whatever else has stopped a training, a limit on time say, is over.
        control.should_training_stop = any(
            each.early_stopping_patience_counter >= each.early_stopping_patience
            for each in self._callbacks()
            if isinstance(each, EarlyStoppingCallback)
        )
        self._loaded = None

    def _callbacks(self) -> list[Any]:
        return [each for each in self.trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


class Trained(nn.Module):
    """The parameters of a module that are trained, as a module: of an adapter in a large model, only its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self.register_parameter(name.replace(".", "/"), parameter)
