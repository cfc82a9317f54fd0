"""The reference of the site: what the docstrings of public names say, as pages that are made when the site is built.

Owns which names there are on which page, and how a docstring becomes Markdown. Sources are read and never imported, so
that a site can be built without torch, and with none of the packages that doors need.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"

PAGES: dict[str, tuple[str, list[str]]] = {
    "reference-flashpoint.md": (
        "Reference: any training loop",
        [
            "ml_flashpoint:Flashpoint Checkpointer Config Persist Keep rest_of_epoch open_version",
            "ml_flashpoint.status:Health Status",
            "ml_flashpoint.engine.save:Save",
            "ml_flashpoint.engine.recovery:KeptVersion",
            "ml_flashpoint.tools.items:OpenVersion",
        ],
    ),
    "reference-dcp.md": (
        "Reference: PyTorch DCP",
        [
            "ml_flashpoint.adapter.pytorch.memory_storage_writer:MemoryStorageWriter",
            "ml_flashpoint.adapter.pytorch.memory_storage_reader:MemoryStorageReader",
            "ml_flashpoint.adapter.pytorch.memory_stager:MemoryStager",
            "ml_flashpoint.core.checkpoint_saver:DefaultMLFlashpointCheckpointSaver",
            "ml_flashpoint.core.checkpoint_loader:DefaultMLFlashpointCheckpointLoader",
            "ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager:CheckpointObjectManager",
            "ml_flashpoint.replication.replication_manager:ReplicationManager",
            "ml_flashpoint.format.names:CheckpointContainerId",
        ],
    ),
    "reference-frameworks.md": (
        "Reference: Megatron-LM, Lightning, Hugging Face, Ray Train, DeepSpeed, torchtitan, NeMo",
        [
            "ml_flashpoint.adapter.megatron.save_strategies:MLFlashpointMegatronAsyncSaveStrategy",
            "ml_flashpoint.adapter.megatron.save_utils:save_local_aware_megatron_checkpoint",
            "ml_flashpoint.adapter.megatron.load_strategies:MLFlashpointMegatronLoadStrategy",
            "ml_flashpoint.adapter.lightning:*",
            "ml_flashpoint.adapter.transformers:*",
            "ml_flashpoint.adapter.accelerate:*",
            "ml_flashpoint.adapter.ray_train:*",
            "ml_flashpoint.adapter.deepspeed:*",
            "ml_flashpoint.adapter.torchtitan:*",
            "ml_flashpoint.adapter.nemo.checkpoint_callback:MLFlashpointCheckpointCallback",
            "ml_flashpoint.adapter.nemo.wrapper_util:wrap_trainer_and_auto_resume_with_mlflashpoint",
        ],
    ),
    "reference-local.md": ("Reference: local checkpointing", ["ml_flashpoint.local:*"]),
    "reference-ddict.md": ("Reference: dictionaries", ["ml_flashpoint.ddict:*", "ml_flashpoint.ddict.native:*"]),
    "reference-strategies.md": (
        "Reference: strategies of replication",
        [
            "ml_flashpoint.ranks.strategies:ReplicationStrategy PairwiseReplicationStrategy RingReplicationStrategy "
            "CliqueStrategy NoReplicationStrategy Topology"
        ],
    ),
    "reference-events.md": (
        "Reference: events",
        ["ml_flashpoint.events:*"],
    ),
    "reference-errors.md": ("Reference: errors", ["ml_flashpoint.format.errors:*"]),
}

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
_Definition = ast.ClassDef | ast.FunctionDef


def _parsed(file: Path) -> ast.Module:
    return _parsed_at(file, file.stat().st_mtime_ns)


@functools.cache
def _parsed_at(file: Path, written_ns: int) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Module:
    """A module's source: where its names come from."""

    name: str
    tree: ast.Module

    @classmethod
    def of(cls, name: str) -> Module | None:
        """The module of a name; None where it is none of this package."""
        path = SOURCES.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return cls(name, _parsed(file))
        return None

    def definition(self, name: str) -> tuple[Module, _Definition] | None:
        """Where ``name`` is defined, followed through imports; None for what is neither class nor function."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and node in self.tree.body:
                return self, node
            if isinstance(node, ast.ImportFrom) and any((each.asname or each.name) == name for each in node.names):
                origin = next(each.name for each in node.names if (each.asname or each.name) == name)
                module = Module.of(node.module or "")
                found = module.definition(origin) if module else None
                if found:
                    return found
        return self._imported_late(name)

    def _imported_late(self, name: str) -> tuple[Module, _Definition] | None:
        """What the module's own `__getattr__` imports: anywhere in a package, there is one public class of a name."""
        folder = SOURCES.joinpath(*self.name.split("."))
        for file in sorted(folder.rglob("*.py")):
            tree = _parsed(file)
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                    return Module(".".join(file.relative_to(SOURCES).with_suffix("").parts), tree), node
        return None

    def public(self) -> list[str]:
        """What `__all__` lists, or else what is imported as itself, and all public classes and functions."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return [str(name) for name in ast.literal_eval(node.value)]
        imports = [each for node in self.tree.body if isinstance(node, ast.ImportFrom) for each in node.names]
        return [each.name for each in imports if each.asname == each.name] + [
            node.name
            for node in self.tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ]

    def inherited(self, definition: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """The class and its bases of this package, nearest first."""
        yield definition
        for base in definition.bases:
            bare = base.value if isinstance(base, ast.Subscript) else base
            found = self.definition(bare.id) if isinstance(bare, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                yield from found[0].inherited(found[1])


def names_of(page: str) -> list[tuple[str, Module, _Definition]]:
    """The path under which a user imports each name of a page, and what it is; constants are left out."""
    found = []
    for entry in PAGES[page][1]:
        path, _, names = entry.partition(":")
        module = Module.of(path)
        assert module is not None, path
        for name in module.public() if names == "*" else names.split():
            definition = module.definition(name)
            if definition is None:
                assert names == "*", entry
                continue
            found.append((f"{path}.{name}", *definition))
    return found


def page_of(name: str) -> str:
    """A page of the reference, as Markdown."""
    title, _ = PAGES[name]
    parts = [f"# {title}", "From the docstrings, when the site is built. The guides say how these are used."]
    names = names_of(name)
    shown = {definition.name for _, _, definition in names}
    for path, module, definition in names:
        parts.append(f"## {definition.name}")
        parts.append(f"`{path}`")
        if isinstance(definition, ast.ClassDef):
            parts += _class(module, definition, shown)
        else:
            parts += [_signature(definition.name, definition), _markdown(ast.get_docstring(definition))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _class(module: Module, definition: ast.ClassDef, shown: set[str]) -> Iterator[str]:
    methods: dict[str, ast.FunctionDef] = {}
    family = list(module.inherited(definition))
    for each in family:
        for node in each.body:
            # What a base that is on the page, too, says of itself is not said again.
            again = each is not definition and each.name in shown
            if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not again):
                methods.setdefault(node.name, node)
    fields = _fields(family)
    if "__init__" in methods:
        yield _signature(definition.name, methods["__init__"])
    elif fields:
        yield _code(f"{definition.name}({', '.join(fields)})", f"{definition.name}(", fields, ")")
    yield _markdown(ast.get_docstring(definition))
    for name, method in methods.items():
        described = ast.get_docstring(method)
        if name.startswith("_") or described is None:
            continue
        kinds = {ast.unparse(each) for each in method.decorator_list}
        yield f"### {definition.name}.{name}"
        if not kinds & {"property", "cached_property", "functools.cached_property"}:
            yield _signature(name, method)
        yield _markdown(described)


def _fields(family: list[ast.ClassDef]) -> list[str]:
    """Of a dataclass, those that its constructor takes."""
    fields: dict[str, str] = {}
    for each in reversed(family):
        if not any("dataclass" in ast.unparse(decorator) for decorator in each.decorator_list):
            continue
        for node in each.body:
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                fields[ast.unparse(node.target)] = ast.unparse(node)
    return [field for name, field in fields.items() if not name.startswith("_")]


def _signature(name: str, function: ast.FunctionDef) -> str:
    arguments = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for kind in (arguments.args.posonlyargs, arguments.args.args):
        if kind and kind[0].arg in ("self", "cls"):
            del kind[0]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    line = f"{name}({ast.unparse(arguments.args)}){returns}"
    return _code(line, f"{name}(", list(_each(arguments.args)), f"){returns}")


def _code(line: str, before: str, arguments: list[str], after: str) -> str:
    if len(line) > 90:
        line = f"{before}\n    " + ",\n    ".join(arguments) + f",\n{after}"
    return f"```python\n{line}\n```"


def _each(arguments: ast.arguments) -> Iterator[str]:
    text, depth, start = ast.unparse(arguments), 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


def _markdown(docstring: str | None) -> str:
    if docstring is None:
        return ""
    first, *rest = _SECTION.split(docstring)
    parts = [_prose(first.strip())]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        indented = re.match(r"\n((?:[ \t]+\S.*\n?|[ \t]*\n)*)", body)
        assert indented is not None
        items, after = textwrap.dedent(indented[1]).strip(), body[indented.end() :].strip()
        parts.append(f"**{title}**")
        parts += [_items(items)] if title in ("Args", "Attributes", "Raises") else [_prose(items)]
        parts.append(_prose(after))
    return "\n\n".join(part for part in parts if part)


def _items(text: str) -> str:
    lines = []
    for item in re.split(r"\n(?=\S)", text):
        name, colon, meaning = item.partition(":")
        shown = f"`{name}`: {_prose(' '.join(meaning.split()))}" if colon else _prose(" ".join(item.split()))
        lines.append(f"* {shown}")
    return "\n".join(lines)


def _prose(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"^::\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"::(\n\n +)", r":\1", text)
    return re.sub(r"<(?=[^`]*(?:`[^`]*`[^`]*)*$)", "&lt;", text)
