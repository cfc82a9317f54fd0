"""Blocks of Python in README and docs/: each as it stands, with folders of the test's own, after what a reader has
before it. Pages about other packages are run beside the tests of their adapters."""

from __future__ import annotations

import ast
import copy
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ml_flashpoint.local
from ml_flashpoint import Checkpointer, Flashpoint, events, open_version
from tests.support.forked import Child, Report, call, call_team
from tests.support.processes import REPOSITORY

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Whole pages that other tests run, block by block, and blocks of others, by something that is in them.
_ELSEWHERE = {
    "tests/ddict/test_docs.py": ("ddict.md", "ddict-persistence.md"),
    "tests/test_doc_commands.py": ("five-minutes.md",),
    "tests/e2e/test_ray_train.py": ("ray-train.md",),
    "tests/adapter/deepspeed/test_engines.py": ("deepspeed.md",),
    "tests/adapter/torchtitan/test_manager.py": ("torchtitan.md",),
    "tests/e2e/test_megatron_bridge.py": ("megatron-bridge.md",),
    "tests/local/test_compat.py": ("compat.install()",),
    "tests/workers/nemo_cases.py": ("nemo.md",),  # by tests/e2e/test_nemo_trainer.py, in NeMo's own environment
}


def _blocks_of(page: str) -> list[str]:
    path = REPOSITORY / page if page == "README.md" else REPOSITORY / "docs" / page
    return _BLOCK.findall(path.read_text(encoding="utf-8"))


def block(page: str, text: str, root: Path) -> str:
    """The block of a page that has this text."""
    found = next(each for each in _blocks_of(page) if text in each)
    for theirs, ours in {
        "/dev/shm/mlf-jobs": root,
        "/data/exports": root / "exports",
        "/lustre/me": root / "durable",
    }.items():
        found = found.replace(theirs, str(ours))
    return found


def test_every_block_is_run() -> None:
    """Or it says here which test does."""
    calls = [
        each for each in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))) if isinstance(each, ast.Call)
    ]
    named = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == "block"]
    here = {(each.args[0].value, each.args[1].value) for each in named}  # type: ignore[attr-defined]
    elsewhere = [mark for marks in _ELSEWHERE.values() for mark in marks]
    assert [test for test in _ELSEWHERE if not (REPOSITORY / test).exists()] == []
    for page in ("README.md", *(path.name for path in sorted((REPOSITORY / "docs").glob("*.md")))):
        marks = [text for name, text in here if name == page] + elsewhere
        for each in _blocks_of(page):
            assert page in elsewhere or any(mark in each for mark in marks), (page, each)


@pytest.fixture
def group() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Crash(Exception):
    """Ends a life."""


# ---- the first screen, and the lines that pages begin with ---------------------------------------------------------

STEPS, SAMPLES = 10, 60


def run_script(report: Report, script: str) -> dict[int, float]:
    """Run it as a program; returns the weight after each step that it prints, which it reports at once, too."""
    weights: dict[int, float] = {}

    def note(step: int, weight: float) -> None:
        weights[step] = weight
        report("printed", step)

    exec(script, {"print": note})
    return weights


def test_the_script_of_the_first_screen_is_killed_and_goes_on(tmpfs: Path) -> None:
    def script(name: str) -> str:
        found = block("README.md", "mlf-jobs/first", tmpfs)
        assert len(found.splitlines()) <= 15
        return found.replace(f"{tmpfs}/first", f"{tmpfs}/{name}").replace("4096", str(SAMPLES))

    undisturbed = call(run_script, script("undisturbed"))
    assert list(undisturbed) == list(range(1, SAMPLES + 1))
    with Child(run_script, script("killed")) as child:
        child.next_report("printed", SAMPLES // 2)
        child.kill()
    rest = call(run_script, script("killed"))
    assert 1 < min(rest) <= SAMPLES, "it goes on, from the newest save that was committed"
    assert rest == {step: weight for step, weight in undisturbed.items() if step >= min(rest)}
    assert call(run_script, script("killed")) == {}, "there is nothing left to do"


def live(lines: str, seed: int, crash_at: int | None = None) -> tuple[list[float], list[bytes]]:
    """Runs the block after what a reader has before it: a model, an optimizer, data."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []

    def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        program["fp"].wait()  # else a slow machine skips saves
        if len(losses) == crash_at:
            raise Crash
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        return loss

    inputs = torch.linspace(-9, 9, 40 * 8).sin().view(40, 8)
    program: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
        "loader": DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4, shuffle=True),
        "load_from_long_term": lambda: 0,
        "loss_of": loss_of,
    }
    try:
        exec(lines, program)
    except Crash:
        pass
    finally:
        program["fp"].close()
    assert program["fp"].health.failures == 0
    return losses, [p.detach().numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("page", ["flashpoint.md", "persist.md"])
def test_lines_of_a_loop_run_and_go_on(tmpfs: Path, page: str) -> None:
    def lines(root: Path) -> str:
        return {
            "flashpoint.md": block("flashpoint.md", "loss_of(model, batch)", root),
            "persist.md": block("persist.md", "loss_of(model, batch)", root),
        }[page]

    undisturbed = live(lines(tmpfs / "undisturbed"), seed=1)
    assert len(undisturbed[0]) == STEPS
    first, _ = live(lines(tmpfs), seed=1, crash_at=3)
    rest, parameters = live(lines(tmpfs), seed=2)
    assert (first + rest, parameters) == undisturbed
    assert live(lines(tmpfs), seed=3) == ([], parameters), "there is nothing left to do"
    if page == "persist.md":
        shutil.rmtree(tmpfs / "job-145")
        assert live(lines(tmpfs), seed=4) == ([], parameters), "it is persisted"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_lines_for_dcp_save_and_load(tmpfs: Path, asynchronous: bool) -> None:
    lines = block("pytorch-dcp.md", 'Checkpointer("/dev/shm/mlf-jobs/job-145"', tmpfs)
    if asynchronous:
        lines = block("pytorch-dcp.md", "CheckpointObjectManager()", tmpfs)
    weights: list[float] = []

    def life(step: int) -> None:
        state = {"weight": torch.full((64, 64), float(step)), "step": step}
        note = lambda: weights.append(state["weight"][0, 0].item())  # type: ignore[index]  # noqa: E731
        program: dict[str, Any] = {"state_dict": state, "last_step": step, "step": step, "train": note}
        exec(lines, program)
        if "future" in program:
            program["future"].result()
            note()

    life(3)
    weights.clear()
    life(5)
    assert weights == [3] if asynchronous else [3, 3], "steps 4 and 5"


def test_lines_for_local_checkpoints_save_and_load(tmpfs: Path) -> None:
    saved: list[int] = []

    def life(seed: int, saves: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Linear(8, 8)

        def save_condition() -> bool:
            if len(saved) == saves:
                raise Crash
            saved.append(program["iteration"])
            return True

        program: dict[str, Any] = {"model": model, "state_dict": model.state_dict(), "save_condition": save_condition}
        with pytest.raises(Crash):
            exec(block("local-checkpointing.md", "find_latest()", tmpfs), program)
        program["ckpt_manager"].close()
        return model

    first, second = life(seed=1, saves=2), life(seed=2, saves=3)
    assert saved == [0, 1, 2]
    assert torch.equal(first.weight, second.weight)


# ---- docs/flashpoint.md, and pages about versions --------------------------------------------------------------


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


def test_small_blocks_of_a_flashpoint(names: dict[str, Any], tmpfs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in block("flashpoint.md", "keep=Keep(", tmpfs).splitlines():
        made: dict[str, Any] = {}
        exec(f"from ml_flashpoint import Flashpoint, Keep\n{line}", made)
        if "fp" in made:
            made["fp"].close()
    fp = names["fp"]
    fp.track(model=names["model"], optimizer=names["optimizer"])
    fp.resume()
    fp.step()
    before = names["model"].head.weight.clone()
    exec(block("flashpoint.md", "fp.before_update()", tmpfs), names)
    assert torch.equal(names["model"].head.weight, before * 0.5)
    exec(block("flashpoint.md", "fp.last_replicated", tmpfs), names)
    for step in (60, 61):
        fp.save(step)
        fp.wait()
    exec(block("flashpoint.md", "fp.versions()", tmpfs), names)
    assert "61 True" in capsys.readouterr().out
    assert (fp.health.failures, fp.steps_done) == (0, 60)


def test_a_loop_over_a_checkpointer(names: dict[str, Any], tmpfs: Path) -> None:
    trained: list[int] = []
    for steps in (2, 5):
        found = {**names, "last_step": steps, "train": lambda: trained.append(1)}
        exec(block("flashpoint.md", "ckpt.load(state)", tmpfs), found)
        assert found["save"].id.step == steps
    assert len(trained) == 5


def test_versions_are_read_from_outside(names: dict[str, Any], tmpfs: Path) -> None:
    root = tmpfs / "jobs"
    with Flashpoint(str(root / "job-145")) as fp:
        fp.track(model=names["model"])
        fp.resume()
        fp.save(60)
        fp.wait()
    weight = names["model"].layer.weight
    for lines in (block("README.md", "open_version(", root), block("object-format.md", "open_version(", root)):
        found: dict[str, Any] = {}
        exec(lines, found)
        assert torch.equal(found["weight"], weight)
        assert found["open_version"] is open_version
    (root / "exports").mkdir()
    exec(block("export.md", "export_version(", root), found)
    assert found["made"].step == 60
    (exported,) = (root / "exports").rglob("*.safetensors")
    assert torch.equal(load_file(exported)["layer.weight"], weight)
    again = copy.deepcopy(names["model"])
    nn.init.zeros_(again.layer.weight)
    exec(block("export.md", "version.state_dict(", root), {"model": again})
    assert torch.equal(again.layer.weight, weight)
    (part,) = (root / "job-145/step-60_ckpt").glob("*.safetensors")
    named = "copies/step-60_ckpt/rank-00000-....safetensors"
    exec(block("object-format.md", "safe_open(", root).replace(named, str(part)))


def test_events(names: dict[str, Any], tmpfs: Path) -> None:
    exec(block("operations.md", "events.subscribe(", tmpfs), names)
    assert names["events"] is events


@pytest.mark.damages_on_purpose
def test_a_damaged_version_is_not_loaded(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    exec(block("bad-copies.md", "one bit of step 2", tmpfs), {})
    assert "step-2_ckpt" in caplog.text


def test_a_job_that_fails_again_and_again_goes_back(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started_again(failures: int) -> int:
        """The step that the block with the rule begins at, after what a reader has before it."""
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(failures))
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        program: dict[str, Any] = {"model": model, "optimizer": optimizer, "load_from_long_term": lambda: 0}
        exec(block("bad-copies.md", "TORCHELASTIC_RESTART_COUNT", tmpfs), program)
        if program["step"] == 0:
            for step in (100, 200, 230, 231):
                program["fp"].save(step)
                program["fp"].wait()
        program["fp"].close()
        return int(program["step"])

    steps = [started_again(failures) for failures in range(5)]
    assert steps == [0, 231, 100, 100, 100], "what was gone back from is not taken again"


# ---- other ways in -----------------------------------------------------------------------------------------------


def test_asynchronous_local_saves(tmpfs: Path) -> None:
    names: dict[str, Any] = {
        "root": str(tmpfs),
        "LocalCheckpointManager": ml_flashpoint.local.LocalCheckpointManager,
        "BasicTensorAwareStateDict": ml_flashpoint.local.BasicTensorAwareStateDict,
        "state_dict": {"weight": torch.ones(4)},
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


@pytest.mark.usefixtures("group")
def test_late_copies_by_dcp(tmpfs: Path) -> None:
    model = nn.Linear(4, 4)
    names: dict[str, Any] = {
        "dcp": dcp,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "state_dict": {"model": model.state_dict()},
        "step": 1,
    }
    with Checkpointer(str(tmpfs / "job")) as engine:
        names["engine"] = engine
        assert engine.latest() is None
        exec(block("pytorch-dcp.md", "engine.writer().watch(optimizer)", tmpfs), names)
        if not hasattr(dcp, "AsyncSaveResponse") and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
            pytest.skip("torch has no staging future")
        exec(block("pytorch-dcp.md", "staging_completion", tmpfs), names)
        names["response"].upload_completion.result()
        assert engine.latest() is not None


@pytest.mark.usefixtures("group")
def test_megatrons_strategies(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
    for name in ("current_device", "synchronize"):  # puts back what the block replaces
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    exec(block("megatron-lm.md", "torch.cuda.current_device", tmpfs), {"torch": torch})
    model = nn.Linear(4, 4)
    names: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "step": 1}

    def run(lines: str) -> None:
        weight = megatron.ShardedTensor.from_rank_offsets("weight", model.weight.data)
        names["sharded_state_dict"] = {"weight": weight, "common": 7}
        exec(lines, names)

    make = block("megatron-lm.md", "import save_local_aware_megatron_checkpoint", tmpfs)
    load = block("megatron-lm.md", "dist_checkpointing.load(", tmpfs)
    run(make)
    run(load)
    assert names["latest"] is None
    run(block("megatron-lm.md", "save_strategy.watch(optimizer)", tmpfs))
    names["step"] = 2
    run(block("megatron-lm.md", "queue.schedule_async_request(", tmpfs))
    names["queue"].close()
    saved = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    run(make)
    run(load)
    assert torch.equal(names["state_dict"]["weight"], saved)
    assert names["state_dict"]["common"] == 7
    names["engine"].close()


def test_lightnings_callback(tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from tests.adapter.lightning.test_callback import Model as Module

    class Trained(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.zeros(1000, 3)))

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}

    def trained(lines: str, steps: int) -> int:
        lines = lines.replace('strategy="fsdp"', 'accelerator="cpu", enable_progress_bar=False, logger=False')
        names["model"] = Trained()
        exec(lines.replace("max_steps=1000", f"max_steps={steps}"), names)
        return int(names["trainer"].global_step)

    assert trained(block("lightning.md", "ModelCheckpoint()", tmpfs), 60) == 60
    assert trained(block("lightning.md", "persist=", tmpfs), 75) == 75, "it goes on from step 60"
    assert list((tmpfs / "durable" / "job-145").rglob("complete.json")), "the last version is persisted"


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
    lines = block("hugging-face.md", 'attach(trainer, "', tmpfs)
    exec(lines, {"model": Regression(), "args": args(1), "data": data})
    names: dict[str, Any] = {"model": Regression(), "args": args(3), "data": data}
    exec(lines, names)
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
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "loader": DataLoader(torch.ones(6, 4), batch_size=2),  # type: ignore[arg-type]
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
    }
    found = block("hugging-face.md", "accelerator.prepare(", tmpfs).replace("Accelerator()", "Accelerator(cpu=True)")
    exec(found, names)
    assert names["fp"].steps_done == 9


def save_by_the_adapter_of_the_page(report: Report, rank: int) -> tuple[int, dict[str, Any]]:
    """Save three times through it, the second time in vain. Returns whose copy is here, and what is loaded."""
    page: Any = ModuleType("how_it_works")
    sys.modules[page.__name__] = page  # dataclasses look their module up
    for lines in _blocks_of("how-it-works.md"):
        exec(lines, page.__dict__)
    door = page.Arrays(os.environ["FLASHPOINT_TEST_BASE"], page.SkipOneStrategy())
    assert door.load() is None
    shared = np.arange(5.0) + rank
    door.save(1, {"weight": shared})
    try:
        door.save(2, {"weight": shared if rank else np.array(["of", "no", "dtype"])})
    except TypeError:
        assert rank == 0
    else:
        assert rank
    door.save(3, {"weight": shared + 1, "bias": np.ones((2, 3), np.int16), "tied": shared, "too": shared})
    checkpointer = door.checkpointer
    assert checkpointer.wait()
    assert checkpointer.status.verified == 3
    (ranks,) = (ranks for save, ranks in checkpointer.container.list_versions().items() if save.step == 3)
    (held,) = ranks - {rank}
    loaded = door.load()
    checkpointer.close()
    return held, loaded


def test_the_strategy_and_the_adapter_that_how_it_works_adds(tmpfs: Path) -> None:
    assert block("how-it-works.md", "class Arrays", tmpfs)
    assert block("how-it-works.md", "class SkipOneStrategy", tmpfs)
    results = call_team(save_by_the_adapter_of_the_page, tmpfs, 3)
    assert [held for held, _ in results] == [1, 2, 0]  # each rank's copy is two nodes further on
    for rank, (_, loaded) in enumerate(results):
        expected = np.arange(5.0) + rank
        assert set(loaded) == {"weight", "bias", "tied", "too"}
        for name, array in {"weight": expected + 1, "tied": expected, "too": expected}.items():
            np.testing.assert_array_equal(loaded[name], array)
        np.testing.assert_array_equal(loaded["bias"], np.ones((2, 3), np.int16))


# ---- docs/migration.md -------------------------------------------------------------------------------------------


class AppState:
    """As in torch's tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class Loop:
    """A life of a loop of docs/migration.md, with a model, an optimizer, and steps of training that draw no numbers."""

    def __init__(
        self, lines: str, folder: Path, *, seed: int, last_step: int, die_at: int | None = None, of_a_team: bool = False
    ) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        if of_a_team:  # several buckets: backward calls several collectives
            self.model = DistributedDataParallel(self.model, bucket_cap_mb=1e-5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.steps: list[int] = []
        self._die_at = die_at
        self.names: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "folder": str(folder),
            "last_step": last_step,
            "train": self._train,
            "AppState": AppState,
        }
        try:
            exec(lines, self.names)
        except Crash:
            pass
        finally:
            for kept in (self.names.get("fp"), self.names.get("engine")):
                if isinstance(kept, (Flashpoint, Checkpointer)):
                    kept.close()
        self.weights = [p.detach().numpy().tobytes() for p in self.model.parameters()]

    def _train(self, step: int) -> None:
        if step == self._die_at:
            raise Crash
        self.steps.append(step)
        self.optimizer.zero_grad()
        self.model(torch.full((2, 4), float(step))).square().mean().backward()
        self.optimizer.step()


def test_a_loop_with_plain_dcp(tmp_path: Path, tmpfs: Path) -> None:
    last, steps = 205, tmp_path / "steps"
    before = block("migration.md", "def load_long_term", tmpfs)
    after = before[: before.index("\n\nfor step")] + block("migration.md", "fallback=load_long_term", tmpfs)
    undisturbed = Loop(before, tmp_path / "undisturbed", seed=1, last_step=last)
    Loop(before, steps, seed=1, last_step=last, die_at=150)
    new = Loop(after, steps, seed=2, last_step=last, die_at=203)
    assert new.steps == list(range(101, 203)), "it goes on from what DCP has saved"
    assert {path.name for path in steps.iterdir()} == {"100", "200"}
    again = Loop(after, steps, seed=3, last_step=last)
    assert again.names["fp"].last_recovery.version == f"step-{again.steps[0] - 1}_ckpt", "and then from memory"
    assert again.steps == list(range(again.steps[0], last + 1))
    assert again.weights == undisturbed.weights


def check_lives(report: Report, rank: int, last_step: int, of_a_team: bool) -> None:
    """The second life goes on from a save of the first one, leaves no step out, and is the undisturbed run."""
    root = Path(os.environ["FLASHPOINT_TEST_BASE"])
    undisturbed, first, again = (
        Loop(
            block("migration.md", "checkpoint_future", root / name),
            root,
            seed=seed,
            last_step=last_step,
            die_at=die_at,
            of_a_team=of_a_team,
        )
        for name, seed, die_at in (("undisturbed", 1, None), ("job", 1, last_step // 2), ("job", 2, None))
    )
    assert first.steps == list(range(1, last_step // 2))
    assert 1 < again.steps[0] <= len(first.steps) + 1, "resumed, from memory: nothing else is saved"
    assert again.steps == list(range(again.steps[0], last_step + 1))
    assert again.weights == undisturbed.weights


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_with_asynchronous_saves(tmpfs: Path, ranks: int) -> None:
    """Also with DDP, on the same gloo group."""
    call_team(check_lives, tmpfs, ranks, 24 if ranks > 1 else 12, ranks > 1, timeout_s=150)


@pytest.fixture
def own_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("nvidia_resiliency_ext"):
            del sys.modules[name]


@pytest.mark.usefixtures("own_modules")
def test_imports_lead_here(tmpfs: Path) -> None:
    names: dict[str, Any] = {}
    exec(block("migration.md", "    AsyncCallsQueue,\n", tmpfs), names)
    exec(block("migration.md", "compat.install()", tmpfs), names)
    assert names["LocalCheckpointManager"] is ml_flashpoint.local.LocalCheckpointManager
    exec(block("migration.md", "this_process", tmpfs), names)
    assert names["DDict"].__module__.startswith("ml_flashpoint.ddict")
    exec(block("migration.md", "import AsyncCheckpointerType", tmpfs), names)
    assert names["AsyncCheckpointerType"].PROCESS
    assert names["MemoryStorageReader"]


@pytest.mark.slow
def test_values_of_another_dictionary(tmp_path: Path, tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": torch.arange(3), "epoch": 7}, "values.pt")
    seen: dict[str, Any] = {}
    lines = block("migration.md", "values.pt", tmpfs)
    exec(lines + "    seen.update((key, d[key]) for key in ('weights', 'epoch'))\n", {"seen": seen})
    assert torch.equal(seen["weights"], torch.arange(3))
    assert seen["epoch"] == 7
