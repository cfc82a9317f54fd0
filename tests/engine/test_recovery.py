"""Recovery with real ranks on nodes that have a base container each: what is found, fetched, refused and recorded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.lineage import RunRecord, newest_begun, read_records, write_record
from tests.support.forked import Team, call_team
from tests.support.part_checker import problems_in
from tests.workers.recovery_job import Plan, await_copies, go_on, play

pytestmark = pytest.mark.damages_on_purpose
Told = list[dict[str, Any]]


def run(root: Path, plan: Plan, nodes: Sequence[int] = (0, 1), **env: str) -> Told:
    """Play a job on ranks that are on these nodes, to its end."""
    with Team(play, root, len(nodes), plan, placement=nodes, env=env) as team:
        return team.results()


def container_of(root: Path, node: int) -> BaseContainer:
    return BaseContainer(root / f"node-{node}" / "job")


def lose(root: Path, node: int) -> None:
    shutil.rmtree(root / f"node-{node}")


def damage(root: Path, node: int, rank: int, step: int, *, run: int = 1) -> None:
    [path] = (root / f"node-{node}" / "job" / f"step-{step}_ckpt").glob(f"rank-{rank:05d}-{run:08d}.safetensors")
    with open(path, "r+b") as file:
        file.seek(9000)
        file.write(b"damaged!")


def all_tell(told: Told, name: str) -> Any:
    """What all ranks tell alike."""
    assert all(each.get(name) == told[0].get(name) for each in told), "\n".join(map(str, told))
    return told[0].get(name)


def test_the_newest_version_is_gone_on_from_by_a_new_run(tmpfs: Path) -> None:
    first = run(tmpfs, Plan(steps=[10, 20]), [0, 0, 1])
    assert all_tell(first, "run") == 1
    assert all_tell(first, "kept") == [(20, True, 3), (10, True, 3)]
    second = run(tmpfs, Plan(steps=[30]), [0, 0, 1])
    assert all_tell(second, "found") == (1, 20)
    assert all_tell(second, "values") == [200.0, 201.0, 202.0]
    assert (all_tell(second, "run"), all_tell(second, "fetched")) == (2, 0)
    assert all_tell(second, "verified") == (SaveId(1, 20),)
    assert all_tell(second, "recovered") is None
    assert all_tell(run(tmpfs, Plan(), [0, 0, 1]), "found") == (2, 30)


@pytest.mark.parametrize("copies", [True, False])
def test_a_lost_nodes_parts_and_copies_are_fetched_or_the_copies_left_to_the_rounds(tmpfs: Path, copies: bool) -> None:
    run(tmpfs, Plan(steps=[10, 20]))
    lose(tmpfs, 1)
    told = run(tmpfs, Plan(copies=copies))
    assert all_tell(told, "found") == (1, 20)
    assert all_tell(told, "values") == [200.0, 201.0]
    assert [each["fetched"] > 0 for each in told] == [False, True]
    assert all_tell(told, "recovered") == (None if copies else SaveId(1, 20))
    assert all_tell(told, "verified") == ((SaveId(1, 20),) if copies else ())
    if copies:
        lose(tmpfs, 0)
        assert all_tell(run(tmpfs, Plan()), "found") == (1, 20), "the next loss is survived"


def test_the_copies_that_a_recovered_version_lacks_are_pushed_first(tmpfs: Path) -> None:
    assert call_team(go_on, tmpfs, 2, [1, 2]) == [[(2, True, 2), (1, True, 2)]] * 2
    for node in (1, 0):
        lose(tmpfs, node)
        last = 3 - node + 1
        assert call_team(go_on, tmpfs, 2, [last]) == [[(last, True, 2), (last - 1, True, 2)]] * 2


def test_a_recovered_version_is_told_as_verified_once_all_its_copies_are_there(tmpfs: Path) -> None:
    call_team(go_on, tmpfs, 2, [1])
    lose(tmpfs, 1)
    assert call_team(await_copies, tmpfs, 2) == [1, 1]


def test_ranks_that_have_changed_nodes_fetch_their_parts(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10], strategy="none"), [0, 1])
    told = run(tmpfs, Plan(strategy="none"), [1, 0])
    assert all_tell(told, "values") == [100.0, 101.0]
    assert all(each["fetched"] > 0 for each in told)
    assert all_tell(told, "verified") == (SaveId(1, 10),)


@pytest.mark.parametrize(
    ("kind", "how"),
    [("safetensors", "damaged"), ("safetensors", 333), ("safetensors", None), ("manifest", 100), ("manifest", None)],
)
def test_a_part_with_a_file_damaged_cut_off_or_gone_is_replaced(tmpfs: Path, kind: str, how: int | str | None) -> None:
    run(tmpfs, Plan(steps=[10, 20]))
    path = tmpfs / "node-0" / "job" / "step-20_ckpt" / f"rank-00000-00000001.{kind}"
    if isinstance(how, int):
        os.truncate(path, how)
    else:
        path.unlink() if how is None else damage(tmpfs, 0, 0, 20)
    told = run(tmpfs, Plan())
    assert (all_tell(told, "found"), all_tell(told, "values")) == ((1, 20), [200.0, 201.0])
    assert all_tell(told, "tries") == (2 if how == "damaged" else 1)
    assert all_tell(told, "verified") == (SaveId(1, 20),), "it has all its copies again"
    assert problems_in(tmpfs) == []


def test_a_damaged_copy_is_found_when_it_is_needed_and_does_not_count_any_more(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20], strategy="ring"), [0, 1, 2])
    lose(tmpfs, 0)
    damage(tmpfs, 1, 0, 20)
    told = run(tmpfs, Plan(strategy="ring"), [0, 1, 2])
    assert all_tell(told, "found") == (1, 10), "the only copy is damaged"
    assert all_tell(told, "values") == [100.0, 101.0, 102.0]
    assert not container_of(tmpfs, 1).list_versions().get(SaveId(1, 20), frozenset()) & {0}, "the damaged copy is gone"


def test_what_may_be_stepped_back_to_stays_while_a_newer_version_is_tried(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20]))
    damage(tmpfs, 1, 1, 20)
    for node, step in ((0, 20), (1, 10)):
        os.truncate(tmpfs / f"node-{node}" / "job" / f"step-{step}_ckpt" / "rank-00001-00000001.manifest", 100)
    told = run(tmpfs, Plan())
    assert (all_tell(told, "found"), all_tell(told, "values")) == ((1, 10), [100.0, 101.0])


def test_a_part_that_is_damaged_everywhere_makes_all_step_back(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20]))
    for node in (0, 1):
        damage(tmpfs, node, 1, 20)
    told = run(tmpfs, Plan(steps=[30]))
    assert all_tell(told, "found") == (1, 10)
    assert all_tell(run(tmpfs, Plan()), "found") == (2, 30)


def test_versions_that_are_all_damaged_are_an_error_that_names_them(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20]))
    for node in (0, 1):
        for step in (10, 20):
            damage(tmpfs, node, 1, step)
    for told in run(tmpfs, Plan()):
        kind, text = told["error"]
        assert kind == "NothingLoadableError"
        assert "step-20_ckpt" in text
        assert "step-10_ckpt" in text
        assert "run" not in told


def test_parts_that_are_lost_are_an_error_and_a_first_save_cut_short_is_not(tmpfs: Path) -> None:
    plan = Plan(steps=[10], absent={10: [1]}, strategy="none")
    run(tmpfs, plan)
    assert all_tell(run(tmpfs, Plan(strategy="none")), "found") is None
    run(tmpfs, Plan(steps=[20], strategy="none", heard=True))
    lose(tmpfs, 1)
    for told in run(tmpfs, Plan(strategy="none")):
        assert told["error"][0] == "NothingLoadableError"
        assert told["parts_lost"]
        assert "the parts of ranks 1 of 2" in told["error"][1]


def test_what_was_gone_back_from_does_not_exist_any_more_wherever_it_comes_from(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20, 30], keep=3))
    shutil.copytree(tmpfs / "node-1", tmpfs / "away")
    back = run(tmpfs, Plan(wanted=10, steps=[15], keep=3))
    assert all_tell(back, "found") == (1, 10)
    assert all_tell(back, "kept") == [(15, True, 2), (10, True, 2)]
    lose(tmpfs, 1)
    (tmpfs / "away").rename(tmpfs / "node-1")
    told = run(tmpfs, Plan(keep=3))
    assert all_tell(told, "found") == (2, 15)
    assert all_tell(told, "run") == 3
    assert all_tell(told, "verified") == (SaveId(1, 10), SaveId(2, 15))


def test_a_step_that_nobody_has_is_an_error(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20]))
    for told in run(tmpfs, Plan(wanted=15)):
        assert told["error"] == ("LoadError", told["error"][1])
        assert "no version of step 15 is held by this job; there are 20, 10" in told["error"][1]


def test_a_run_that_never_began_counts_for_its_number_alone(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20]))
    container = container_of(tmpfs, 0)
    [record] = read_records(container)
    write_record(container, type(record)(7, {}))
    told = run(tmpfs, Plan())
    assert all_tell(told, "found") == (1, 20)
    assert all_tell(told, "run") == 8


def test_a_run_that_begins_anew_has_no_versions(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20]))
    assert all_tell(run(tmpfs, Plan(anew=True)), "run") == 2
    told = run(tmpfs, Plan())
    assert (all_tell(told, "found"), all_tell(told, "run")) == (None, 3)


def test_versions_that_the_program_cannot_load_are_passed_over(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20]))
    assert all_tell(run(tmpfs, Plan(discard=1, begin=False)), "found") == (1, 10)
    assert all_tell(run(tmpfs, Plan(discard=2)), "found") is None


@pytest.mark.parametrize("nodes", [[0], [0, 1], [0, 0, 1, 1]])
def test_another_number_of_ranks_reads_all_parts_from_where_they_are(tmpfs: Path, nodes: list[int]) -> None:
    run(tmpfs, Plan(steps=[10, 20]), [0, 0, 1])
    if len(nodes) == 1:
        lose(tmpfs, 1)  # of its rank, node 0 has a copy
    told = run(tmpfs, Plan(), nodes)
    assert all_tell(told, "values") == [200.0, 201.0, 202.0]
    assert (all_tell(told, "verified"), all_tell(told, "recovered")) == ((SaveId(1, 20),), None)


@pytest.mark.parametrize("full", [False, True])
def test_another_number_of_ranks_retains_the_newest_version_with_all_copies_where_there_is_room(
    small_tmpfs: Path, full: bool
) -> None:
    run(small_tmpfs, Plan(steps=[10, 20], uncopied=[20]), [0, 0, 1, 1])
    if full:
        (small_tmpfs / "others").write_bytes(bytes(shutil.disk_usage(small_tmpfs).free - 200_000))
    told = run(small_tmpfs, Plan())
    assert all_tell(told, "found") == (1, 20)
    assert all_tell(told, "verified") == ((SaveId(1, 20),) if full else (SaveId(1, 10), SaveId(1, 20)))
    assert all_tell(told, "recovered") is None, "no round can be about another number's parts"


def test_a_version_of_another_number_of_ranks_is_retained_until_a_newer_one_has_all_copies(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10]), [0, 0, 1, 1])
    run(tmpfs, Plan(steps=[20], uncopied=[20]))
    told = run(tmpfs, Plan(copies=False))
    assert all_tell(told, "found") == (2, 20)
    assert (all_tell(told, "verified"), all_tell(told, "recovered")) == ((SaveId(1, 10),), SaveId(2, 20))
    lose(tmpfs, 1)
    assert all_tell(run(tmpfs, Plan(copies=False)), "found") == (1, 10)


def test_parts_written_by_different_tables_are_no_version(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10, 20], tables={10: ["a", "a"], 20: ["a", "b"]}))
    assert all_tell(run(tmpfs, Plan()), "found") == (1, 10)


def test_files_beside_the_parts_come_back_on_every_node(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10], sidecars={"metadata.json": b"{}"}))
    lose(tmpfs, 1)
    assert all_tell(run(tmpfs, Plan()), "found") == (1, 10)
    for node in (0, 1):
        assert (tmpfs / f"node-{node}" / "job" / "step-10_ckpt" / "metadata.json").read_bytes() == b"{}"


def test_the_durable_store_is_gone_on_from_where_it_has_the_newest_version(tmpfs: Path) -> None:
    url = f"file://{tmpfs}/durable"
    run(tmpfs, Plan(steps=[10, 20], persisted=[10, 20], durable=url))
    told = run(tmpfs, Plan(durable=url))
    assert (all_tell(told, "found"), all_tell(told, "tier")) == ((1, 20), "memory")
    for node in (0, 1):
        damage(tmpfs, node, 1, 20)
    told = run(tmpfs, Plan(durable=url, begin=False))
    assert (all_tell(told, "found"), all_tell(told, "tier")) == ((1, 20), "persisted")
    assert all_tell(told, "values") == [200.0, 201.0]
    lose(tmpfs, 0)
    lose(tmpfs, 1)
    told = run(tmpfs, Plan(durable=url))
    assert (all_tell(told, "found"), all_tell(told, "tier")) == ((1, 20), "persisted")
    assert all_tell(told, "run") == 2
    assert (all_tell(told, "verified"), all_tell(told, "recovered")) == ((), None)


def test_a_planted_folder_makes_no_number_of_a_run_unreadable(tmpfs: Path) -> None:
    url = f"file://{tmpfs}/durable"
    for name in ("run-999999999999999999", "run-9999999999999"):
        (tmpfs / "durable" / name / "step-10_ckpt").mkdir(parents=True)
    assert all_tell(run(tmpfs, Plan(steps=[10], durable=url)), "run") == 1
    (tmpfs / "durable" / "run-999999999999" / "step-10_ckpt").mkdir(parents=True)
    for told in run(tmpfs, Plan(durable=url)):
        assert told["error"][0] == "SaveError"
        assert "no run can follow run 999999999999" in told["error"][1]


def test_a_damaged_durable_version_makes_all_step_back_to_memory(tmpfs: Path) -> None:
    url = f"file://{tmpfs}/durable"
    run(tmpfs, Plan(steps=[10, 20], persisted=[20], durable=url))
    for node in (0, 1):
        damage(tmpfs, node, 1, 20)
    for path in (tmpfs / "durable").rglob("rank-00001-*.safetensors"):
        path.unlink()
    told = run(tmpfs, Plan(durable=url))
    assert (all_tell(told, "found"), all_tell(told, "tier")) == ((1, 10), "memory")


IMPATIENT = {"FLASHPOINT_RECOVERY_DEADLINE_S": "0.5"}


@pytest.mark.parametrize("hangs", [True, False])
def test_a_durable_store_that_cannot_be_read_is_no_start_from_nothing(tmpfs: Path, hangs: bool) -> None:
    url = "nosuchprotocol://bucket/job"
    for told in run(tmpfs, Plan(durable=url, hangs=hangs), **IMPATIENT):
        assert told["error"][0] == "NothingLoadableError"
        assert f"{url} cannot be known" in told["error"][1]
    for told in run(tmpfs, Plan(anew=True, durable=url, hangs=hangs), **IMPATIENT):
        assert told["error"][0] == "SaveError"
        assert "no number can be chosen for the run" in told["error"][1]


def test_memory_is_gone_on_from_beside_a_durable_store_that_hangs(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10]))
    told = run(tmpfs, Plan(durable=f"file://{tmpfs}/durable", hangs=True), **IMPATIENT)
    assert (all_tell(told, "found"), all_tell(told, "run")) == ((1, 10), 2)


def test_a_full_tmpfs_is_an_error_on_all_ranks_until_there_is_room(small_tmpfs: Path) -> None:
    run(small_tmpfs, Plan(steps=[10, 20]))
    lose(small_tmpfs, 1)
    for told in run(small_tmpfs, Plan(fill_up=True), **IMPATIENT):
        assert told["error"][0] == "NothingLoadableError"
        assert "rank 1 on node-1: no room for one more slot" in told["error"][1]
    for path in small_tmpfs.rglob("others"):
        path.unlink()
    assert all_tell(run(small_tmpfs, Plan()), "found") == (1, 20)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("engine.recovery.read_records", "LoadError"),
        ("engine.copying.Copies.fetch_part", "NothingLoadableError"),
        ("engine.reader.MemoryParts.open_here", "NothingLoadableError"),
        ("memory.container.BaseContainer.write_sidecars", "NothingLoadableError"),
        ("engine.recovery.write_record", "SaveError"),
        ("engine.recovery.mark_begun", "SaveError"),
    ],
)
def test_a_fault_on_one_rank_is_an_error_on_all(tmpfs: Path, name: str, kind: str) -> None:
    run(tmpfs, Plan(steps=[10], sidecars={"file": b"x"}))
    lose(tmpfs, 1)
    told = run(tmpfs, Plan(fault=(1, f"ml_flashpoint.{name}", SaveError("broken on purpose"))), **IMPATIENT)
    assert [each["error"][0] for each in told] == [kind, kind]
    assert "broken on purpose" in told[1]["error"][1]
    if name != "engine.recovery.mark_begun":  # a run begins once all nodes have its record
        assert newest_begun(read_records(container_of(tmpfs, 0))) == RunRecord(1, begun=True)
    assert all_tell(run(tmpfs, Plan()), "found") == (1, 10), "nothing was lost"


def test_a_damaged_record_of_a_run_is_an_error_that_says_what_to_do(tmpfs: Path) -> None:
    run(tmpfs, Plan(steps=[10]))
    path = tmpfs / "node-0" / "job" / ".flashpoint" / "runs" / "00000001.begun"
    path.write_bytes(b"nonsense")
    for told in run(tmpfs, Plan(), **IMPATIENT):
        assert told["error"][0] == "LoadError"
        assert "if another node has the record of this run, remove this one" in told["error"][1]
    path.unlink()
    assert all_tell(run(tmpfs, Plan()), "found") == (1, 10)
