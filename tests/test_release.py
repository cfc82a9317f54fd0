"""What users get: a source distribution, the wheel built from it, and both in an environment with nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import ml_flashpoint
from ml_flashpoint.extras import DISTRIBUTION, require
from tests.support.processes import REPOSITORY

_SOURCE = Path(ml_flashpoint.__file__).parent
_REQUIREMENTS = {"PYTHONPATH": sysconfig.get_paths()["purelib"]}  # where no .pth file, of this repository, counts
_OURS = {"PYTHONPATH": str(_SOURCE.parent)}
_BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
_HEAVY = {"torch", "numpy", "psutil", "xxhash", "safetensors", "prometheus_client", "ray", "fsspec"}


def _run(*argv: object, cwd: Path | None = None, env: dict[str, str] | None = None, ends: int = 0) -> str:
    """What is said in an environment without what would lead to the sources of this repository."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "FLASHPOINT"))}
    done = subprocess.run(
        [str(each) for each in argv], cwd=cwd, env={**clean, **(env or {})}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == ends, done.stdout + done.stderr
    return done.stderr if ends else done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that pip builds from that, with no network."""
    folder = tmp_path_factory.mktemp("release")
    tree = folder / "tree"
    (tree / "src").mkdir(parents=True)
    for name in _BUILT_FROM:
        (tree / name).write_bytes((REPOSITORY / name).read_bytes())
    for path in _SOURCE.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".typed"):
            target = tree / "src" / path.relative_to(_SOURCE.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    _run(sys.executable, "-c", build, folder, cwd=tree)
    (archive,) = folder.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-index", "--no-deps")
    _run(*pip, "--no-build-isolation", "--wheel-dir", folder, archive, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and nothing else: no pip, none of the requirements."""
    folder = tmp_path_factory.mktemp("installed")
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    # With the pip that runs elsewhere, whichever release it is, and whatever else it sees there.
    pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--ignore-installed")
    _run(*pip, "--no-index", "--no-deps", distributions[1], env=_REQUIREMENTS)
    return folder


@pytest.mark.slow
def test_everything_is_in_the_distributions(distributions: tuple[Path, Path]) -> None:
    archive, wheel = distributions
    here = {str(path.relative_to(_SOURCE.parent)) for path in _SOURCE.rglob("*.py")} | {"ml_flashpoint/py.typed"}
    with zipfile.ZipFile(wheel) as files:
        packed = set(files.namelist())
        metadata = files.read(next(name for name in packed if name.endswith("METADATA"))).decode()
    assert {name for name in packed if name.startswith("ml_flashpoint/")} == here
    with tarfile.open(archive) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    assert {f"src/{name}" for name in here} | {*_BUILT_FROM} <= names
    assert f"\nVersion: {ml_flashpoint.__version__}\n" in metadata
    assert wheel.name == f"torch_flashpoint-{ml_flashpoint.__version__}-py3-none-any.whl"
    wanted = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch") and "extra" not in line]
    assert wanted == [], "users bring their own torch"


@pytest.mark.slow
def test_it_is_imported_and_its_command_runs_where_nothing_else_is(installed: Path) -> None:
    python = (installed / "bin/python", "-I", "-c")
    version, file = json.loads(
        _run(*python, "import json, ml_flashpoint as m; print(json.dumps([m.__version__, m.__file__]))")
    )
    assert version == ml_flashpoint.__version__
    assert Path(file).is_relative_to(installed)
    assert (Path(file).parent / "py.typed").exists()
    text = _run(installed / "bin/flashpoint", "--version", env=_REQUIREMENTS)
    assert text == f"flashpoint {ml_flashpoint.__version__}\n"
    assert "Memory-first checkpoints" in _run(installed / "bin/flashpoint", "--help", env=_REQUIREMENTS)


def test_everything_says_the_same_name() -> None:
    tomllib = pytest.importorskip("tomllib", reason="is in Python from 3.11 on")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == ml_flashpoint.DISTRIBUTION
    for requirements in project["optional-dependencies"].values():
        assert not [each for each in requirements if each.startswith("ml-flashpoint")]
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")):
        assert "install ml-flashpoint" not in page.read_text(encoding="utf-8").replace('"', "").replace("'", "")


def test_the_command_says_that_the_package_is_somebody_elses(tmp_path: Path) -> None:
    package = tmp_path / "ml_flashpoint"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cli").symlink_to(_SOURCE / "cli")
    program = "from ml_flashpoint.cli.main import main; main()"
    said = _run(sys.executable, "-c", program, env={"PYTHONPATH": str(tmp_path)}, ends=1)
    assert "is of another distribution" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "missing", "extra"),
    [
        ("from ml_flashpoint import Flashpoint", "torch", "pytorch"),
        ("import ml_flashpoint.local", "torch", "pytorch"),
        ("import ml_flashpoint.adapter.megatron.save_strategies", "megatron", "megatron"),
        ("import ml_flashpoint.adapter.lightning", "lightning", "lightning"),
        ("import ml_flashpoint.adapter.accelerate", "accelerate", "accelerate"),
        ("import ml_flashpoint.adapter.ray_train", "pyarrow", "ray-train"),
        ("import ml_flashpoint.adapter.deepspeed", "deepspeed", "deepspeed"),
        ("import ml_flashpoint.adapter.torchtitan", "torchtitan", "torchtitan"),
        ("import ml_flashpoint.adapter.transformers", "transformers", "transformers"),
        ("import ml_flashpoint.ddict", "cloudpickle", "ddict"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(line: str, missing: str, extra: str) -> None:
    said = _run(sys.executable, "-c", f"import sys; sys.modules[{missing!r}] = None\n{line}", env=_OURS, ends=1)
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: this part of ml_flashpoint needs {missing}, which is not installed.")
    assert f'pip install "{DISTRIBUTION}[{extra}]"' in last


def _imports_of(program: str) -> set[str]:
    """Modules that a program has imported by its end, beside those that every program has."""
    program = f"import sys; before = set(sys.modules)\n{program}\nprint('', *sorted(set(sys.modules) - before))"
    return set(_run(sys.executable, "-c", program, env=_OURS).splitlines()[-1].split())


def test_an_import_takes_the_standard_library_alone_and_help_no_more_than_its_text() -> None:
    found = _imports_of("import ml_flashpoint")
    assert {name for name in found if name.startswith("ml_flashpoint")} == {"ml_flashpoint", "ml_flashpoint.extras"}
    assert {name.partition(".")[0] for name in found} - {"ml_flashpoint"} <= sys.stdlib_module_names
    found = _imports_of("from ml_flashpoint.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass")
    ours = {"ml_flashpoint", "ml_flashpoint.extras", "ml_flashpoint.cli"}
    ours |= {f"ml_flashpoint.cli.{name}" for name in ("main", "app", "looking", "moving", "planning")}
    assert {name for name in found if name.startswith("ml_flashpoint")} == ours
    assert not {name.partition(".")[0] for name in found} & _HEAVY
    require("pytorch", "this", "torch")
    assert "this" not in sys.modules, "what is there is not imported"
