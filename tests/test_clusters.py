"""What docs/kubernetes.md and docs/slurm.md have users submit, compared with what the code and torchrun read."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import UnsafePathError
from tests.support.processes import REPOSITORY, child_environment

yaml = pytest.importorskip("yaml", reason="PyYAML comes with mkdocs, which environments of the matrix lack")

_GRACE_S = 20.0  # the default of `Flashpoint(..., grace_s=)`
_STUB = """#!/bin/bash
echo "$(basename "$0") $*" >> "$RECORD"
case "$(basename "$0") $*" in
    "scontrol show hostnames"*) printf 'node%s\\n' 1 2 3 4 5 ;;
    "srun "*" true") for host in $DOWN; do case "$*" in *--nodelist=$host\\ *) exit 1 ;; esac; done ;;
    "srun "*) [ "$(grep -c torchrun "$RECORD")" -ge "$ROUNDS" ] ;;
esac
"""


def blocks_of(page: str, language: str) -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


class Manifest:
    """What docs/kubernetes.md has users submit."""

    def __init__(self) -> None:
        (text,) = blocks_of("kubernetes.md", "yaml")
        self.objects = {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(text)}
        self.set = self.objects["JobSet/train"]["spec"]
        (self.workers,) = self.set["replicatedJobs"]
        self.job = self.workers["template"]["spec"]
        self.pod = self.job["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self.options = get_args_parser().parse_args(self.container["args"])


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Manifest()


def test_a_pods_memory_stays_when_its_container_ends_and_has_the_base_container(manifest: Manifest) -> None:
    pod, container = manifest.pod, manifest.container
    assert manifest.objects["JobSet/train"]["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert (manifest.job["completionMode"], manifest.workers["replicas"]) == ("Indexed", 1)
    assert (pod["restartPolicy"], manifest.job["backoffLimit"] >= 100) == ("OnFailure", True)
    assert pod["terminationGracePeriodSeconds"] > _GRACE_S
    assert all(each["effect"] == "NoExecute" and each["tolerationSeconds"] < 300 for each in pod["tolerations"])
    memory = next(each for each in pod["volumes"] if each["name"] == "memory")["emptyDir"]
    assert memory["medium"] == "Memory"
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    has, may_fill = (int(each.removesuffix("Gi")) for each in (resources["limits"]["memory"], memory["sizeLimit"]))
    assert has > may_fill, "what is written counts as the container's"
    mounted = next(each["mountPath"] for each in container["volumeMounts"] if each["name"] == "memory")
    assert Path(mounted) in Path(container["args"][-1]).parents, "a base container is no mount point"
    (first,) = pod["initContainers"]
    assert first["command"] == ["chmod", "1777", mounted]
    assert [each["name"] for each in first["volumeMounts"]] == ["memory"]
    assert first["securityContext"]["runAsUser"] == 0


def test_pods_and_agents_are_as_many_and_meet(manifest: Manifest) -> None:
    options, job = manifest.options, manifest.job
    assert manifest.container["command"] == ["torchrun"]
    assert int(options.nnodes) == job["parallelism"] == job["completions"]
    assert int(options.nproc_per_node) == manifest.container["resources"]["limits"]["nvidia.com/gpu"]
    assert options.rdzv_backend == "c10d"
    assert re.fullmatch(rf"train-{manifest.workers['name']}-0-0\.train:\d+", options.rdzv_endpoint)
    assert manifest.set["network"]["enableDNSHostnames"] is True


def test_a_spare_has_the_place_of_a_worker_and_gives_it_up(manifest: Manifest) -> None:
    spare = manifest.objects["Deployment/spare"]["spec"]
    pod = spare["template"]["spec"]
    (container,) = pod["containers"]
    assert [container[each] for each in ("resources", "image")] == [
        manifest.container[each] for each in ("resources", "image")
    ]
    values = {name: manifest.objects[f"PriorityClass/{name}"]["value"] for name in ("spare", "training")}
    assert values[pod["priorityClassName"]] < values[manifest.pod["priorityClassName"]]
    assert spare["selector"]["matchLabels"] == {"role": "spare"}
    (apart,) = manifest.pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"] == {"role": "worker"}


def test_variables_are_those_that_the_code_reads() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "src").rglob("*.py")]
    for page in ("kubernetes.md", "slurm.md"):
        blocks = [*blocks_of(page, "yaml"), *blocks_of(page, "bash")]
        for name in set(re.findall(r"\b(?:FLASHPOINT|TORCH)_[A-Z_]+", "".join(blocks))):
            assert any(f'"{name}"' in source for source in sources), (page, name)


def test_a_folder_as_kubernetes_makes_it_is_refused_and_a_sticky_one_is_taken(tmpfs: Path) -> None:
    volume = tmpfs / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    with pytest.raises(UnsafePathError, match="0777"):
        Flashpoint(str(volume / "mlf-jobs" / "train"))
    volume.chmod(0o1777)
    Flashpoint(str(volume / "mlf-jobs" / "train")).close()


def _submitted(tmp_path: Path, down: str, rounds: int) -> tuple[int, list[str]]:
    """Runs the batch script; its exit code, and what it called. The step of the given round is the first to work."""
    programs = tmp_path / "bin"
    programs.mkdir(parents=True)
    for name in ("srun", "scontrol"):
        (programs / name).write_text(_STUB)
        (programs / name).chmod(0o755)
    (script,) = blocks_of("slurm.md", "bash")
    environment = child_environment(
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
        RECORD=str(tmp_path / "record"),
        DOWN=down,
        ROUNDS=str(rounds),
        USER="me",
        SLURM_JOB_ID="145",
        SLURM_JOB_NODELIST="node[1-5]",
        SLURM_SUBMIT_DIR=str(tmp_path),
    )
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    return result.returncode, (tmp_path / "record").read_text().splitlines()


def test_the_next_round_leaves_out_a_node_that_does_not_answer(tmp_path: Path) -> None:
    code, calls = _submitted(tmp_path, down="node2", rounds=3)
    assert code == 0
    steps = [each.split() for each in calls if " torchrun " in each]
    assert len(steps) == 3
    assert not any(each.startswith("scontrol requeue") for each in calls)
    identities = set()
    for step in steps:
        assert "--nodelist=node1,node3,node4,node5" in step
        options = get_args_parser().parse_args(step[step.index("torchrun") + 1 :])
        assert int(options.nnodes) == 4
        assert options.rdzv_backend == "c10d"
        assert options.rdzv_endpoint == "node1:29400"
        assert options.training_script_args == ["/dev/shm/me/job-145"]
        identities.add(options.rdzv_id)
    assert len(identities) == 3


def test_a_spare_node_waits_while_the_others_train_and_with_too_few_the_job_is_queued_again(tmp_path: Path) -> None:
    _, calls = _submitted(tmp_path / "all", down="", rounds=1)
    (step,) = [each for each in calls if " torchrun " in each]
    assert "--nodelist=node1,node2,node3,node4 " in step
    _, calls = _submitted(tmp_path / "few", down="node2 node4", rounds=1)
    assert not any(" torchrun " in each for each in calls)
    assert calls[-1] == "scontrol requeue 145"
