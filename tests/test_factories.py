"""Every tensor that this package makes names its device and dtype: a program may have set other defaults."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

import ml_flashpoint

_SOURCES = Path(ml_flashpoint.__file__).parent
# What `torch.set_default_device` changes. Those that end in `_like` are not among them: they have what they are like.
_FACTORIES = frozenset(function.__name__ for function in _device_constructors())
# Their memory is on the CPU, whatever is set.
_OF_MEMORY = frozenset({"frombuffer", "from_file"})


def _vague(path: Path) -> Iterator[str]:
    """Calls of torch's factories that leave a device or a dtype to what the program has set."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for alias in node.names:
                if alias.name in _FACTORIES | _OF_MEMORY:
                    yield f"{path}:{node.lineno}: call it as torch.{alias.name}"
        if not isinstance(node, ast.Call) or not isinstance(function := node.func, ast.Attribute):
            continue
        if not isinstance(function.value, ast.Name) or function.value.id != "torch":
            continue
        named = {keyword.arg for keyword in node.keywords}
        wanted = {"device", "dtype"} if function.attr in _FACTORIES else set()
        if function.attr in _OF_MEMORY:
            wanted = {"dtype"}
        if missing := wanted - named:
            yield f"{path}:{node.lineno}: torch.{function.attr} without {' and '.join(sorted(missing))}"


def test_every_factory_names_its_device_and_dtype() -> None:
    assert [each for path in sorted(_SOURCES.rglob("*.py")) for each in _vague(path)] == []


def test_a_factory_that_leaves_something_to_the_program_is_found(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    for code, told in (
        ("torch.empty(3)", "torch.empty without device and dtype"),
        ("torch.zeros(3, dtype=torch.int8)", "torch.zeros without device"),
        ("torch.frombuffer(b)", "torch.frombuffer without dtype"),
        ("from torch import full", "call it as torch.full"),
    ):
        path.write_text(f"import torch\n{code}\n")
        assert list(_vague(path)) == [f"{path}:2: {told}"]
