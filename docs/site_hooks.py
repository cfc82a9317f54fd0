"""What `make docs` does to pages before mkdocs reads them: README becomes the first one, the reference is made from the
docstrings, and links fit the site.

Owns the rule for links: those to pages of docs/ lead there, and those to other files of the repository, which a site
has not, become their paths.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z]+:|#|/")


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs: adds README as the first page, and the reference."""
    from mkdocs.structure.files import File

    readme = Path(config["config_file_path"]).with_name("README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=fitted(readme, "")))
    made = reference()
    for name in made.PAGES:
        files.append(File.generated(config, name, content=made.page_of(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs, for each page."""
    generated = page.file.src_uri == "index.md" or page.file.src_uri.startswith("reference-")
    return markdown if generated else fitted(markdown, "docs")


def reference() -> ModuleType:
    """The module beside this one: mkdocs loads hooks by their path, from which nothing can be imported."""
    name = "site_reference"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def fitted(markdown: str, folder: str) -> str:
    """A page with links that fit the site.

    Args:
        markdown: as it is in the repository.
        folder: of the repository, that the page is in.
    """

    def fit(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if _ELSEWHERE.match(target):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{hash_sign}{anchor})"
        return f"{text} (`{path}`)"

    return _LINK.sub(fit, markdown)
