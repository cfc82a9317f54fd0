"""The pages of docs/: links lead somewhere, the site has all pages, and is built without a warning."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.processes import REPOSITORY, child_environment

_DOCS = REPOSITORY / "docs"
_PAGES = [*sorted(_DOCS.glob("*.md")), *(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))]


def _without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub and mkdocs make them alike."""
    headings = re.findall(r"^#+ (.*)", _without_code(page), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", each) for each in words}


def test_links_lead_somewhere() -> None:
    for page in _PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page)):
            if not target.startswith(("https:", "http:")):
                path, _, anchor = target.partition("#")
                other = (page.parent / path) if path else page
                assert other.exists(), (page.name, target)
                assert not anchor or anchor in _anchors(other), (page.name, target)


def test_tests_that_a_page_names_are_there() -> None:
    for page in _DOCS.glob("*.md"):
        for path, test in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
            assert f"\ndef {test}(" in (REPOSITORY / "tests" / path).read_text(encoding="utf-8"), (page.name, test)


def test_the_first_screen_is_there() -> None:
    """In README's first 40 lines: one sentence, status, picture, gain, cost, script, table of frameworks."""
    text = "\n".join((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    parts = ("\n**", "> **Status", "```text", "`make demo`", "**For**", "**Not for**", "**It costs**", "```python")
    assert [part for part in (*parts, "| PyTorch DCP") if part not in text] == []
    assert text.count("```") == 4


def test_the_site_has_all_pages() -> None:
    nav = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert sorted(re.findall(r"- ([\w-]+\.md)", nav)) == sorted(
        ["index.md", *(page.name for page in _DOCS.glob("*.md")), *_of_docs("site_reference").PAGES]
    )


_ADAPTERS = tuple(
    f".adapter.{name}" for name in ("accelerate", "deepspeed", "lightning", "ray_train", "torchtitan", "transformers")
)
_PACKAGES = (*_ADAPTERS, ".local", ".events", ".ddict", ".ddict.native")


def test_the_reference_has_all_public_names() -> None:
    reference = _of_docs("site_reference")
    shown = {path for page in reference.PAGES for path, _, _ in reference.names_of(page)}
    for package in (f"ml_flashpoint{each}" for each in ("", *_PACKAGES)):
        module = reference.Module.of(package)
        defined = {f"{package}.{name}" for name in module.public() if module.definition(name) is not None}
        assert defined, package
        assert defined <= shown


def test_the_matrix_by_door_has_what_tests_run_with() -> None:
    page = (_DOCS / "compatibility.md").read_text(encoding="utf-8")
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    pins = dict(re.findall(r'"?([a-z][\w-]*)(?:\[\w+\])?==([\d.]+)', makefile[: makefile.index("NEMO_BIN :=")]))
    newer = makefile.index("NEWER_BIN :=")
    of_nemo = dict(
        re.findall(r'"([a-z][\w-]*)(?:\[\w+\])?==([\d.]+)"', makefile[makefile.index("NEMO_PINS :=") : newer])
    )
    newest, oldest = re.findall(r'"megatron-core==([\d.]+)"', makefile[newer:])
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE))
    megatron = f"megatron-core {pins['megatron-core']} and {newest}, torch {pins['torch']}"
    assert rows["[Megatron-LM](megatron-lm.md)"] == megatron
    assert f"megatron-core {of_nemo['megatron-core']} and {oldest}, too" in page
    assert rows["`Flashpoint`, [DCP](pytorch-dcp.md), [local](local-checkpointing.md)"] == f"torch {pins['torch']}"
    trainers = dict(re.findall(r'"(torchtitan|deepspeed)==([\d.]+)"', makefile))
    assert rows["[DeepSpeed](deepspeed.md)"] == f"deepspeed {trainers['deepspeed']}, torch {pins['torch']}"
    assert rows["[torchtitan](torchtitan.md)"] == f"torchtitan {trainers['torchtitan']}, torch {pins['torch']}"
    nemo = [f"{name} {of_nemo[name]}" for name in ("nemo_toolkit", "megatron-core", "torch")]
    assert rows["[NeMo](nemo.md)"] == ", ".join(nemo)
    for name, door in (
        ("lightning", "[Lightning](lightning.md)"),
        ("torch", "[Trainer, Accelerate](hugging-face.md)"),
        ("ray", "[Ray Train](ray-train.md)"),
        ("ray", "[Dictionaries](ddict.md) on many machines"),
    ):
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # in an environment of the matrix
            continue
        assert installed.startswith(rows[door].split()[-1]), (name, installed)


def test_a_docstring_becomes_markdown() -> None:
    reference = _of_docs("site_reference")
    page = reference.page_of("reference-strategies.md")
    assert "## RingReplicationStrategy\n\n`ml_flashpoint.ranks.strategies.RingReplicationStrategy`" in page
    assert "```python\nRingReplicationStrategy(copies: int = 1)\n```" in page
    assert "**Raises**\n\n* `InvalidArgumentError`: `copies` is not an integer of at least 1." in page
    assert page.count("### ") == len(set(re.findall("### .*", page)))
    assert "PairwiseReplicationStrategy.held_by" not in page, "said of its base"
    for name in reference.PAGES:
        text = reference.page_of(name)
        assert "``" not in text.replace("```", ""), "left over from reStructuredText"
        assert not re.search(r":\w+:`", text)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """What `make docs` does, elsewhere."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: environments of the matrix lack it")
    environment = child_environment() | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    built = {page.stem for page in (tmp_path / "site").glob("*.html")}
    assert built >= {"index", *(page.stem for page in _DOCS.glob("*.md"))}


@functools.cache
def _of_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_pictures_show_what_the_code_says() -> None:
    pictures = _of_docs("site_pictures")
    assert pictures.main(["--check"]) == 0, "python docs/site_pictures.py draws them"
    assert {path.name for path in pictures.FOLDER.iterdir()} == set(pictures.PICTURES)


def test_links_fit_the_site() -> None:
    fitted = _of_docs("site_hooks").fitted
    for folder, link, fitting in (
        ("", "[a](docs/ddict.md#b)", "[a](ddict.md#b)"),
        ("", "[a](CHANGELOG.md)", "a (`CHANGELOG.md`)"),
        ("docs", "[a](../examples/x.py)", "a (`examples/x.py`)"),
        ("docs", "[a](#b)", "[a](#b)"),
        ("docs", "[a](https://pytorch.org)", "[a](https://pytorch.org)"),
    ):
        assert fitted(f"See {link}.", folder) == f"See {fitting}."
