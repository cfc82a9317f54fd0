"""The pages of docs/: links lead somewhere, and the site has all pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.processes import REPOSITORY

_DOCS = REPOSITORY / "docs"
_PAGES = [*sorted(_DOCS.glob("*.md")), *(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))]


def _without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub and mkdocs make them alike."""
    headings = re.findall(r"^#+ (.*)", _without_code(page), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", each) for each in words}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page)):
        if target.startswith(("https:", "http:")):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path) if path else page
        assert other.exists(), target
        assert not anchor or anchor in _anchors(other), target


def test_the_site_has_all_pages() -> None:
    nav = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert sorted(re.findall(r"- ([\w-]+\.md)", nav)) == sorted(
        ["index.md", *(page.name for page in _DOCS.glob("*.md"))]
    )


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", _DOCS / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("folder", "link", "fitting"),
    [
        ("", "[a](docs/ddict.md#b)", "[a](ddict.md#b)"),
        ("", "[a](CHANGELOG.md)", "a (`CHANGELOG.md`)"),
        ("docs", "[a](ddict.md#b)", "[a](ddict.md#b)"),
        ("docs", "[a](../examples/x.py)", "a (`examples/x.py`)"),
        ("docs", "[a](#b)", "[a](#b)"),
        ("docs", "[a](https://pytorch.org)", "[a](https://pytorch.org)"),
    ],
)
def test_links_fit_the_site(hooks: ModuleType, folder: str, link: str, fitting: str) -> None:
    assert hooks.fitted(f"See {link}.", folder) == f"See {fitting}."
