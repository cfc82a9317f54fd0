"""`flashpoint doctor`: what it finds on a node, and between nodes that are launched together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from ml_flashpoint.cli import examination
from ml_flashpoint.cli.doctor_peers import Sent, _judge
from ml_flashpoint.cli.examination import BAD, NOTE, OK, Finding
from ml_flashpoint.cli.main import app
from tests.support.cluster import Cluster, free_port
from tests.support.processes import child_environment

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FLASHPOINT_HOST")


@pytest.fixture(autouse=True)
def _is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _LAUNCHED:
        monkeypatch.delenv(name, raising=False)


def _found(base: Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in examination.examine(base)}


def test_a_node_as_it_should_be(tmpfs: Path) -> None:
    found = _found(tmpfs / "jobs" / "job-1")
    assert {found[name].level for name in ("folder", "versions", "variables")} == {OK}
    assert "can be created" in found["folder"].text
    assert found["filesystem"].text.startswith("tmpfs at /dev/shm: ")
    assert not [finding for finding in found.values() if "cannot be checked" in finding.text]
    assert not (tmpfs / "jobs").exists(), "nothing was made"


def test_a_folder_that_cannot_be_used(tmpfs: Path) -> None:
    (tmpfs / "job").mkdir(mode=0o777)
    (tmpfs / "job").chmod(0o777)
    found = _found(tmpfs / "job")["folder"]
    assert (found.level, "chmod o-w" in found.mend) == (BAD, True)
    found = _found(Path("/dev/shm"))["folder"]
    assert (found.level, found.mend) == (BAD, "name a folder in it: /dev/shm/job-1")


def test_the_filesystem(monkeypatch: pytest.MonkeyPatch, tmpfs: Path) -> None:
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=8 << 30))
    monkeypatch.setattr(examination, "mount_of", lambda path: ("/dev/shm", "tmpfs", ("rw", "huge=within_size")))
    found = _found(tmpfs)
    assert (found["huge pages"].level, found["swap"].level) == (OK, NOTE)
    assert "8.0 GiB" in found["swap"].text
    monkeypatch.setattr(examination, "mount_of", lambda path: ("/dev/shm", "tmpfs", ("rw", "noswap")))
    found = _found(tmpfs)
    assert (found["huge pages"].level, found["swap"].level) == (NOTE, OK)
    monkeypatch.setattr(examination, "is_memory", lambda path: False)
    disk = _found(tmpfs)["filesystem"]
    assert (disk.level, disk.mend.startswith("mount -t tmpfs -o size=")) == (BAD, True)


def test_limits_of_the_process(tmpfs: Path) -> None:
    """In another process, whose limits may be lowered for good."""
    script = (
        "import resource, sys; from pathlib import Path; from ml_flashpoint.cli.examination import examine; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1])); "
        "print(*(f.level + ' ' + f.text for f in examine(Path(sys.argv[1])) if f.check == 'open files')); "
        "sys.exit('torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", script, str(tmpfs)]
    done = subprocess.run(argv, capture_output=True, text=True, env=child_environment(), timeout=60)
    assert (done.returncode, done.stdout[:9]) == (0, "note 512:"), done.stderr


def test_the_environment(monkeypatch: pytest.MonkeyPatch, tmpfs: Path) -> None:
    assert _found(tmpfs)["route"].mend == "start it like the job, under torchrun or srun"
    monkeypatch.setenv("FLASHPOINT_HOST", "203.0.113.9")  # TEST-NET-3: nobody's
    monkeypatch.setenv("FLASHPOINT_SEAL_DEADLINE_S", "soon")
    found = _found(tmpfs)
    assert (found["ports"].level, found["variables"].level) == (BAD, BAD)
    assert "203.0.113.9" in found["ports"].text
    assert "FLASHPOINT_SEAL_DEADLINE_S must be a positive number, got 'soon'" in found["variables"].text
    monkeypatch.setenv("FLASHPOINT_HOST", "127.0.0.1")
    found = _found(tmpfs)
    assert (found["ports"].level, found["route"].level) == (OK, OK)
    addresses = {"eth0": [SimpleNamespace(address="127.0.0.1")], "ib0": [SimpleNamespace(address="10.1.0.1")]}
    speeds = {"eth0": 1000, "ib0": 400_000}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=True, speed=each) for name, each in speeds.items()}
    )
    slow = _found(tmpfs)["route"]
    assert (slow.level, slow.text) == (NOTE, "127.0.0.1 is eth0, 1000 Mb/s, and ib0 is up with 400000 Mb/s")
    assert "ib0" in slow.mend


def test_what_cannot_be_looked_at_hides_nothing_else(monkeypatch: pytest.MonkeyPatch, tmpfs: Path) -> None:
    def fail() -> None:
        raise PermissionError("not in this container")

    monkeypatch.setattr(psutil, "swap_memory", fail)
    found = _found(tmpfs)
    assert (found["filesystem"].level, found["versions"].level) == (NOTE, OK)
    assert found["filesystem"].text == "cannot be checked: PermissionError: not in this container"


def test_what_is_printed(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner().invoke
    done = run(app, ["doctor", str(tmpfs / "job"), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"], told["base"]) == (0, True, str(tmpfs / "job"))
    (node,) = told["examined"]
    assert node["name"] == "this node"
    assert all(set(finding) == {"check", "level", "text", "mend"} for finding in node["findings"])
    done = run(app, ["doctor", "/dev/shm"])
    assert done.exit_code == 1
    assert "  FAIL folder: /dev/shm is the mount point" in done.stdout
    done = run(app, ["doctor", "job"])
    assert done.exit_code == 2


def test_what_is_found_between_nodes() -> None:
    def of(rank: int, gbs: float, error: str = "") -> Sent:
        return Sent(rank, f"node-{rank // 2}", (f"node-{1 - rank // 2}",) if gbs else (), gbs, error)

    assert [each.level for each in _judge([of(0, 1.0), of(1, 2.0), of(2, 1.0), of(3, 1.0)])] == [OK, OK]
    slow, other = _judge([of(0, 0.1), of(1, 0.1), of(2, 2.0), of(3, 2.0)])
    assert (slow.level, other.level) == (NOTE, OK)
    assert "0.20 GB/s; the median of this job is 2.10" in slow.text
    failed, _ = _judge([of(0, 1.0), of(1, 0.0, "refused"), of(2, 2.0), of(3, 2.0)])
    assert failed.level == BAD
    assert "rank 1 has no copy: refused" in failed.text


def _launch(tmpfs: Path, hosts: str, *options: str) -> tuple[list[int | None], str]:
    """Exit codes, and what rank 0 has printed; the other one has printed nothing."""
    preload = ["ml_flashpoint.cli.doctor_peers"]
    with Cluster(tmpfs, "doctor", nodes=2, args=[hosts, *options], preload=preload) as cluster:
        codes = cluster.wait(check=False)
        assert not re.search(r"^(node|this)", cluster.outputs()[1], re.MULTILINE)
        assert [list(cluster.node_folder(node).iterdir()) for node in range(2)] == [[], []], "what was measured is gone"
        return codes, cluster.outputs()[0]


@pytest.mark.slow
def test_two_nodes_that_reach_each_other(tmpfs: Path) -> None:
    codes, text = _launch(tmpfs, "127.0.0.1,127.0.0.1", "--json")
    assert codes == [0, 0], text
    nodes = json.loads(text[text.index("{") :])["examined"]
    assert [each["name"] for each in nodes] == ["node-0", "node-1", "between nodes"]
    found = [(each["check"], each["level"]) for each in nodes[-1]["findings"]]
    assert found == [("releases", OK), ("releases", OK), ("clocks", OK), ("copies", OK), ("copies", OK)]


@pytest.mark.slow
def test_two_nodes_of_which_one_cannot_be_reached(tmpfs: Path) -> None:
    codes, text = _launch(tmpfs, "127.0.0.1,203.0.113.9")
    assert codes == [1, 1], text
    assert "FAIL ports: cannot listen at 203.0.113.9" in text
    assert "FAIL copies: node-1 to its peer: rank 1 has no copy: cannot listen" in text


@pytest.mark.slow
def test_a_node_that_does_not_come(monkeypatch: pytest.MonkeyPatch, tmpfs: Path) -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    set_by_it = {"FLASHPOINT_COLLECTIVE_DEADLINE_S": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    for name, value in (launched | set_by_it).items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["doctor", str(tmpfs / "job"), "--deadline-seconds", "1"])
    assert done.exit_code == 1
    assert "FAIL peers: ranks cannot connect to each other at 127.0.0.1:" in done.stdout
