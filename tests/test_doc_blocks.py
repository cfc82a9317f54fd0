"""Blocks of Python in README and docs/ that no other test runs: each after what a reader has before it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ml_flashpoint import Checkpointer, Flashpoint, events, open_version
from tests.support.processes import REPOSITORY

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Whole pages that other tests run, block by block, and blocks of others, by something that is in them.
_ELSEWHERE = {
    "tests/ddict/test_docs.py": ("ddict.md", "ddict-persistence.md"),
    "tests/test_how_it_works.py": ("how-it-works.md",),
    "tests/test_guides.py": ("five-minutes.md", "bad-copies.md"),
    "tests/test_migration.py": ("migration.md",),
    "tests/test_readme.py": (
        "mlf-jobs/first",
        "loss_of(model, batch)",
        'Checkpointer("/dev/shm/mlf-jobs/job-145"',
        "CheckpointObjectManager()",
        "find_latest()",
    ),
    "tests/flashpoint/test_keep.py": ("keep=Keep(",),
    "tests/e2e/test_ray_train.py": ("ray-train.md",),
    "tests/adapter/deepspeed/test_engines.py": ("deepspeed.md",),
    "tests/adapter/torchtitan/test_manager.py": ("torchtitan.md",),
    "tests/e2e/test_megatron_bridge.py": ("megatron-bridge.md",),
    "tests/local/test_compat.py": ("compat.install()",),
    "tests/workers/nemo_cases.py": ("nemo.md",),  # by tests/e2e/test_nemo_trainer.py, in NeMo's own environment
}
_RUN_HERE: list[tuple[str, str]] = [
    ("flashpoint.md", "while step < steps"),
    ("flashpoint.md", "def sum_up"),
    ("flashpoint.md", "reshard=rest_of_epoch"),
    ("flashpoint.md", "fp.before_update()"),
    ("flashpoint.md", "fp.last_replicated"),
    ("flashpoint.md", "fp.versions()"),
    ("flashpoint.md", "ckpt.load(state)"),
    ("README.md", "open_version("),
    ("object-format.md", "open_version("),
    ("object-format.md", "safe_open("),
    ("export.md", "export_version("),
    ("export.md", "version.state_dict("),
    ("operations.md", "events.subscribe("),
    ("local-checkpointing.md", "LazyCliqueReplicationStrategy("),
    ("local-checkpointing.md", "AsyncCallsQueue()"),
    ("pytorch-dcp.md", "engine.writer().watch(optimizer)"),
    ("pytorch-dcp.md", "staging_completion"),
    ("lightning.md", "ModelCheckpoint()"),
    ("lightning.md", "persist="),
    ("hugging-face.md", 'attach(trainer, "'),
    ("hugging-face.md", "cfg.run_name"),
    ("hugging-face.md", "accelerator.prepare("),
    ("megatron-lm.md", "torch.cuda.current_device"),
    ("megatron-lm.md", "import save_local_aware_megatron_checkpoint"),
    ("megatron-lm.md", "queue.schedule_async_request("),
    ("megatron-lm.md", "save_strategy.watch(optimizer)"),
    ("megatron-lm.md", "dist_checkpointing.load("),
]


def _page(name: str) -> Path:
    return REPOSITORY / name if name == "README.md" else REPOSITORY / "docs" / name


def block(page: str, text: str, root: Path) -> str:
    assert (page, text) in _RUN_HERE
    (found,) = [each for each in _BLOCK.findall(_page(page).read_text(encoding="utf-8")) if text in each]
    return found.replace("/dev/shm/mlf-jobs", str(root)).replace("/data/exports", str(root / "exports"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)


class Counter:
    tokens = 0

    def state_dict(self) -> dict[str, int]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tokens = state["tokens"]


@pytest.fixture
def names(tmpfs: Path) -> Iterator[dict[str, Any]]:
    """What the blocks of docs/flashpoint.md have before them; `fp` is closed afterwards."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.arange(64.0))
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    found = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "dataset": dataset,
        "sampler": sampler,
        "loader": DataLoader(dataset, batch_size=32, sampler=sampler),
        "counter": Counter(),
        "DataLoader": DataLoader,
        "DistributedSampler": lambda dataset: DistributedSampler(dataset, num_replicas=1, rank=0),
        "Flashpoint": Flashpoint,
        "torch": torch,
        "fp": Flashpoint(str(tmpfs / "first"), keep=3),
    }
    yield found
    found["fp"].close()


def test_loops_over_epochs(names: dict[str, Any], tmpfs: Path) -> None:
    names["fp"].track(model=names["model"], loader=names["loader"])
    names |= {"step": names["fp"].resume(), "steps": 3, "epochs": 4}
    exec(block("flashpoint.md", "while step < steps", tmpfs), names)
    assert names["step"] == 8, "four epochs of two batches"


def test_what_becomes_of_states_on_other_ranks(names: dict[str, Any], tmpfs: Path) -> None:
    exec(block("flashpoint.md", "def sum_up", tmpfs), names)
    states = [{"tokens": 3}, {"tokens": 4}]
    assert [names["sum_up"](states, rank, 2) for rank in range(2)] == [{"tokens": 7}, {"tokens": 0}]
    assert names["fp"].resume() == 0


def test_the_rest_of_an_epoch(names: dict[str, Any], tmpfs: Path) -> None:
    names["epochs"] = 2
    exec(block("flashpoint.md", "reshard=rest_of_epoch", tmpfs), names)
    assert names["fp"].steps_done == 4


def test_small_blocks_of_a_flashpoint(names: dict[str, Any], tmpfs: Path) -> None:
    fp = names["fp"]
    fp.track(model=names["model"], optimizer=names["optimizer"])
    fp.resume()
    fp.step()
    before = names["model"].head.weight.clone()
    exec(block("flashpoint.md", "fp.before_update()", tmpfs), names)
    assert torch.equal(names["model"].head.weight, before * 0.5)
    exec(block("flashpoint.md", "fp.last_replicated", tmpfs), names)
    fp.save(60)
    fp.wait()
    exec(block("flashpoint.md", "fp.versions()", tmpfs), names)
    assert fp.health.failures == 0
    assert fp.steps_done == 60
    fp.close()


def test_a_loop_over_a_checkpointer(names: dict[str, Any], tmpfs: Path) -> None:
    trained: list[int] = []
    for steps in (2, 5):
        found = {**names, "last_step": steps, "train": lambda: trained.append(1)}
        exec(block("flashpoint.md", "ckpt.load(state)", tmpfs), found)
        assert found["save"].id.step == steps
    assert len(trained) == 5


def test_versions_are_read_from_outside(names: dict[str, Any], tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmpfs / "jobs"
    with Flashpoint(str(root / "job-145")) as fp:
        fp.track(model=names["model"])
        fp.resume()
        fp.save(60)
        fp.wait()
    weight = names["model"].layer.weight
    for page in ("README.md", "object-format.md"):
        found: dict[str, Any] = {}
        exec(block(page, "open_version(", root), found)
        assert torch.equal(found["weight"], weight)
        assert found["open_version"] is open_version
    (tmpfs / "exports").mkdir()
    exec(block("export.md", "export_version(", root).replace(str(root / "exports"), str(tmpfs / "exports")), found)
    assert found["made"].step == 60
    (exported,) = (tmpfs / "exports").rglob("*.safetensors")
    assert torch.equal(load_file(exported)["layer.weight"], weight)
    again = copy.deepcopy(names["model"])
    nn.init.zeros_(again.layer.weight)
    exec(block("export.md", "version.state_dict(", root), {"model": again})
    assert torch.equal(again.layer.weight, weight)
    (part,) = (root / "job-145/step-60_ckpt").glob("*.safetensors")
    exec(
        block("object-format.md", "safe_open(", root).replace(
            "copies/step-60_ckpt/rank-00000-....safetensors", str(part)
        )
    )


def test_events(names: dict[str, Any], tmpfs: Path) -> None:
    exec(block("operations.md", "events.subscribe(", tmpfs), names)
    assert names["events"] is events


def test_asynchronous_local_saves(tmpfs: Path) -> None:
    from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

    state = {"weight": torch.ones(4)}
    names: dict[str, Any] = {
        "root": str(tmpfs),
        "LocalCheckpointManager": LocalCheckpointManager,
        "BasicTensorAwareStateDict": BasicTensorAwareStateDict,
        "state_dict": state,
        "iteration": 7,
        "save_condition": lambda: True,
    }
    exec(block("local-checkpointing.md", "LazyCliqueReplicationStrategy(", tmpfs), names)
    try:
        assert names["ckpt_manager"].find_latest() == -1
        exec(block("local-checkpointing.md", "AsyncCallsQueue()", tmpfs), names)
        assert names["ckpt_manager"].find_latest() == 7
    finally:
        names["ckpt_manager"].close()


def test_late_copies_by_dcp(tmpfs: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = nn.Linear(4, 4)
    names: dict[str, Any] = {
        "dcp": dcp,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "state_dict": {"model": model.state_dict()},
        "step": 1,
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Checkpointer(str(tmpfs / "job")) as engine:
            names["engine"] = engine
            assert engine.latest() is None
            exec(block("pytorch-dcp.md", "engine.writer().watch(optimizer)", tmpfs), names)
            if not hasattr(dcp, "AsyncSaveResponse") and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
                pytest.skip("torch has no staging future")
            exec(block("pytorch-dcp.md", "staging_completion", tmpfs), names)
            names["response"].upload_completion.result()
            assert engine.latest() is not None
    finally:
        dist.destroy_process_group()


def test_megatrons_strategies(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
    for name in ("current_device", "synchronize"):  # puts back what the block replaces
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    exec(block("megatron-lm.md", "torch.cuda.current_device", tmpfs), {"torch": torch})
    model = nn.Linear(4, 4)

    def sharded() -> dict[str, Any]:
        return {"weight": megatron.ShardedTensor.from_rank_offsets("weight", model.weight.data), "common": 7}

    names: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "step": 1}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for mark in ("import save_local_aware_megatron_checkpoint", "dist_checkpointing.load("):
            names["sharded_state_dict"] = sharded()
            exec(block("megatron-lm.md", mark, tmpfs), names)
        assert names["latest"] is None
        exec(block("megatron-lm.md", "save_strategy.watch(optimizer)", tmpfs), names)
        names |= {"step": 2, "sharded_state_dict": sharded()}
        exec(block("megatron-lm.md", "queue.schedule_async_request(", tmpfs), names)
        names["queue"].close()
        saved = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        exec(block("megatron-lm.md", "import save_local_aware_megatron_checkpoint", tmpfs), names)
        names["sharded_state_dict"] = sharded()
        exec(block("megatron-lm.md", "dist_checkpointing.load(", tmpfs), names)
        assert torch.equal(names["state_dict"]["weight"], saved)
        assert names["state_dict"]["common"] == 7
        names["engine"].close()
    finally:
        dist.destroy_process_group()


def _module() -> Any:
    """What a reader has before the blocks about Lightning."""
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from tests.adapter.lightning.test_callback import Model as Module

    class Trained(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.zeros(1000, 3)))

        def on_train_start(self) -> None:
            self.began_at = self.trainer.global_step

    return Trained()


def test_lightnings_callback(tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": _module()}

    def on_one_cpu(text: str, steps: int) -> str:
        found = block("lightning.md", text, tmpfs).replace("/lustre/me", str(tmp_path))
        found = found.replace('strategy="fsdp"', 'accelerator="cpu", enable_progress_bar=False, logger=False')
        return found.replace("max_steps=1000", f"max_steps={steps}")

    exec(on_one_cpu("ModelCheckpoint()", 60), names)
    assert names["trainer"].global_step == 60
    names["model"] = _module()
    exec(on_one_cpu("persist=", 75), names)
    assert names["trainer"].global_step == 75, "it goes on from step 60"
    assert list((tmp_path / "job-145").rglob("complete.json")), "the last version is persisted"


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def test_a_trainer_is_attached(tmpfs: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def args(epochs: int) -> Any:
        options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        return transformers.TrainingArguments(str(tmp_path), num_train_epochs=epochs, **options)

    data = [{"x": torch.ones(1)}] * 16
    exec(block("hugging-face.md", 'attach(trainer, "', tmpfs), {"model": Regression(), "args": args(1), "data": data})
    names: dict[str, Any] = {"model": Regression(), "args": args(3), "data": data}
    exec(block("hugging-face.md", 'attach(trainer, "', tmpfs), names)
    assert names["trainer"].state.global_step == 6
    assert names["trainer"]._initial_global_step == 0, "the loss is that of both runs"
    exec(block("hugging-face.md", "cfg.run_name", tmpfs), names)
    another = transformers.Trainer(Regression(), args(1), train_dataset=data)
    cfg = type("Cfg", (), {"run_name": "axolotl"})
    assert names["InMemory"]().add_callbacks_post_trainer(cfg, another) == []
    another.train()
    assert (tmpfs / "axolotl" / "step-2_ckpt").is_dir()


def test_an_accelerators_loop(tmpfs: Path) -> None:
    pytest.importorskip("accelerate")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "model": model,
        "optimizer": optimizer,
        "loader": DataLoader(torch.ones(6, 4), batch_size=2),  # type: ignore[arg-type]
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
    }
    found = block("hugging-face.md", "accelerator.prepare(", tmpfs).replace("Accelerator()", "Accelerator(cpu=True)")
    exec(found, names)
    assert names["fp"].steps_done == 9  # type: ignore[attr-defined]


def test_every_block_is_run() -> None:
    """Or it says here why not."""
    whole = {mark for marks in _ELSEWHERE.values() for mark in marks if mark.endswith(".md")}
    marks = [mark for each in _ELSEWHERE.values() for mark in each if not mark.endswith(".md")]
    for test in _ELSEWHERE:
        assert (REPOSITORY / test).exists()
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))):
        if page.name in whole:
            continue
        known = [text for name, text in _RUN_HERE if name == page.name]
        for each in _BLOCK.findall(page.read_text(encoding="utf-8")):
            assert any(mark in each for mark in (*known, *marks)), (page.name, each)
