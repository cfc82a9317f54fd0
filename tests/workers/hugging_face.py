"""A small GPT that is trained by Accelerate, or by the Trainer of Transformers, killed with SIGKILL at some steps, and
trained once more undisturbed, in the life that gets to the end.

Arguments: the kind of training, and the steps after which rank 0 kills itself, once each.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ml_flashpoint.adapter.accelerate import AcceleratorFlashpoint
from ml_flashpoint.adapter.transformers import attach, resume_path
from tests.support.state_digest import digest
from tests.support.worker import base_path, leave, rank, report

SAMPLES, EPOCHS, CONTEXT = 46, 2, 16


def model_of(kind: str) -> Any:
    torch.manual_seed(1)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2))
    if "lora" in kind:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1))
    return model


def data() -> list[dict[str, torch.Tensor]]:
    chances = (torch.Generator().manual_seed(seed) for seed in range(SAMPLES))
    return [{"input_ids": torch.randint(0, 50, (CONTEXT,), generator=chance)} for chance in chances]


def collate_by_chance(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Masks tokens by random numbers of torch, Python and NumPy."""
    ids = torch.stack([row["input_ids"] for row in rows])
    some = torch.rand(ids.shape) < random.uniform(0.1, 0.3) + float(np.random.uniform(0, 0.1))
    ids = torch.where(some, torch.randint(0, 50, ids.shape), ids)
    return {"input_ids": ids, "labels": ids}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


class Life:
    """One life of the job: reports losses, and ends it after some steps."""

    def __init__(self, kills: list[int], begins: int) -> None:
        self._kills = [step for step in kills if step > begins]
        self.losses: dict[str, Any] = {}

    def tell(self, step: object, value: Any) -> None:
        self.losses[str(step)] = value
        report(step=str(step), value=value)

    def end_at(self, step: int, flashpoint: Any) -> None:
        if self._kills and step == self._kills[0] and rank() == 0:
            flashpoint.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def forget_accelerator() -> None:
    """Have the next accelerator of this process begin anew, in the same process group."""
    AcceleratorState._reset_state()
    GradientState._reset_state()


def by_accelerate(kind: str, base: Path, kills: list[int], seed: int) -> dict[str, Any]:
    forget_accelerator()
    seed_all(seed)  # another one in each life, as in a program that sets none
    accumulates = 2 if "accumulates" in kind else 1
    config = DataLoaderConfiguration(use_seedable_sampler=accumulates > 1)
    accelerator = Accelerator(gradient_accumulation_steps=accumulates, dataloader_config=config)
    workers = 2 if kind == "accelerate-workers" else 0
    loader: Any = torch.utils.data.DataLoader(
        data(),  # type: ignore[arg-type]
        batch_size=2,
        shuffle=True,
        collate_fn=collate if workers else collate_by_chance,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    model = model_of(kind)
    seed_all(seed)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    flashpoint = AcceleratorFlashpoint(accelerator, base, strict=True)
    done = flashpoint.resume()
    report(resumes=done)
    life = Life(kills, done)
    for epoch in range(done // -(-len(loader) // accumulates), EPOCHS):
        for batch in flashpoint.batches(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done = flashpoint.step()
            if accelerator.sync_gradients:
                life.tell(f"{epoch}:{done}", loss.item())
                life.end_at(done, flashpoint)
    flashpoint.close()
    return {"losses": life.losses, "weights": digest(model.state_dict()), "failures": flashpoint.health.failures}


def steady(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if "runtime" not in name and "per_second" not in name}


class Teller(TrainerCallback):  # type: ignore[misc]
    """Tells what is logged, and ends lives."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.flashpoint: Any = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.life.tell(f"{state.global_step}:{sorted(steady(logs))}", steady(logs))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.life.end_at(state.global_step, self.flashpoint)


def by_trainer(kind: str, base: Path, kills: list[int], seed: int) -> dict[str, Any]:
    forget_accelerator()
    options: dict[str, Any] = {
        "trainer-ddp-accumulates": {"gradient_accumulation_steps": 2, "eval_strategy": "epoch", "eval_steps": None},
        "trainer-workers": {
            "dataloader_num_workers": 2,
            "dataloader_persistent_workers": True,
            "accelerator_config": {"use_seedable_sampler": False},
        },
        "trainer-lora-stops": {"max_steps": 15},
        "trainer-fsdp2": {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}},
    }.get(kind, {})
    defaults = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": EPOCHS,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "dataloader_pin_memory": False,
    }
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(output_dir=str(base.parent / "output"), **defaults | quiet | options)
    if kind == "trainer-fsdp2":  # Accelerate shards nothing where it sees no GPU
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    model = model_of(kind)
    seed_all(seed)
    teller = Teller(Life(kills, 0))
    trainer = Trainer(
        model,
        args,
        train_dataset=data(),  # type: ignore[arg-type]
        eval_dataset=data()[:4],  # type: ignore[arg-type]
        data_collator=collate if kind == "trainer-workers" else collate_by_chance,
        callbacks=[teller],
    )
    attach(trainer, base, strict=True)
    path = resume_path(trainer)
    report(resumes=0 if path is None else 1)
    teller.flashpoint = trainer._ml_flashpoint.flashpoint
    teller.life = Life(kills, trainer._ml_flashpoint.step_found or 0)
    trainer.train(resume_from_checkpoint=path)
    sharded = any(isinstance(each, DTensor) for each in trainer.model.parameters())
    assert sharded == (kind == "trainer-fsdp2")
    return {
        "losses": teller.life.losses,
        "weights": digest(trainer.model.state_dict()),
        "history": [steady(logs) for logs in trainer.state.log_history],
        "failures": teller.flashpoint.health.failures,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("kills", type=int, nargs="*")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run = by_accelerate if given.kind.startswith("accelerate") else by_trainer
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    report(resumed=run(given.kind, base_path(), given.kills, 7 + life))
    report(undisturbed=run(given.kind, base_path().with_name("undisturbed"), [], 7))
    leave()
