"""The form of what subcommands print with ``--json``, as JSON Schema (draft 2020-12), for `flashpoint schema`.

Owns these descriptions and nothing that is printed. They are versioned together: fields may be added under the same
number, which readers leave out that do not know them; what is taken away or changes its meaning raises it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from ml_flashpoint.cli import output
from ml_flashpoint.cli.losses import Loss
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.status import RankStatus

VERSION: Final = 1

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_INTEGER: Final[Schema] = {"type": "integer"}
_NUMBER: Final[Schema] = {"type": "number"}
_BOOL: Final[Schema] = {"type": "boolean"}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _map(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def _object(optional: dict[str, Schema] | None = None, **required: Schema) -> Schema:
    """Of these fields; those with a name that Python keeps for itself end in an underscore here."""
    fields = {name.rstrip("_"): schema for name, schema in required.items()}
    return {"type": "object", "required": sorted(fields), "properties": {**fields, **(optional or {})}}


def _words(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


_TYPES: Final = {
    "int": _INTEGER,
    "float": _NUMBER,
    "str": _TEXT,
    "bool": _BOOL,
    "int | None": _maybe(_INTEGER),
    "float | None": _maybe(_NUMBER),
    "str | None": _maybe(_TEXT),
    "tuple[str, ...]": _list(_TEXT),
}


def _of(kind: type) -> dict[str, Schema]:
    """The fields of a dataclass of plain values."""
    return {field.name: _TYPES[str(field.type)] for field in dataclasses.fields(kind)}


_PROBLEM = _object(path=_TEXT, message=_TEXT)
_RANK = _object(
    rank=_INTEGER,
    pid=_maybe(_INTEGER),
    state=_words("ok", "degraded", "silent", "ended"),
    status=_maybe(_object(**_of(RankStatus))),
)
_LOSS_FIELDS = _of(Loss)
_LOSS_FIELDS["from"] = _LOSS_FIELDS.pop("sources")
_LOSS = _object(**_LOSS_FIELDS)
_PART = _object(
    rank=_INTEGER,
    copy=_BOOL,
    node=_maybe(_TEXT),
    bytes=_INTEGER,
    manifest=_TEXT,
    objects=_list(_object(path=_TEXT, bytes=_INTEGER, file_bytes=_INTEGER)),
    labels=_map(_TEXT),
)
_HELD_VERSION = _object(
    version=_TEXT,
    step=_INTEGER,
    attempt=_TEXT,
    state=_words("damaged", "writing", "replicated", "local"),
    world_size=_maybe(_INTEGER),
    complete=_BOOL,
    own_ranks=_list(_INTEGER),
    copied_ranks=_list(_INTEGER),
    writing_ranks=_list(_INTEGER),
    bytes=_INTEGER,
    pins=_list(_TEXT),
    abandoned=_BOOL,
    parts=_list(_PART),
    problems=_list(_PROBLEM),
)
_STORED_VERSION = _object(
    version=_TEXT,
    step=_INTEGER,
    attempt=_TEXT,
    state=_words("complete", "incomplete", "damaged", "removed"),
    world_size=_maybe(_INTEGER),
    complete=_BOOL,
    ranks=_list(_INTEGER),
    bytes=_INTEGER,
    folder=_TEXT,
    problems=_list(_TEXT),
)
_BASE = _object(
    base=_TEXT,
    live=_list(_INTEGER),
    leftover=_BOOL,
    steps=_list(_INTEGER),
    complete=_maybe(_INTEGER),
    resident_bytes=_INTEGER,
    updated_s=_NUMBER,
)
_VERIFIED_PART = _object(
    rank=_INTEGER,
    copy=_BOOL,
    bytes=_INTEGER,
    result=_words("ok", "damaged", "pruned"),
    problems=_list(_PROBLEM),
)
_VERIFIED = _object(version=_TEXT, step=_INTEGER, attempt=_TEXT, ok=_BOOL, parts=_list(_VERIFIED_PART))
_SUM = _maybe(_object(count=_INTEGER, mean_s=_NUMBER, most_s=_NUMBER))
_REPORT_RANK = _object(
    rank=_INTEGER,
    node=_TEXT,
    saves=_INTEGER,
    failures=_INTEGER,
    part_bytes=_INTEGER,
    verified=_maybe(_INTEGER),
    held=_SUM,
)
_ITEM = _object(name=_TEXT, dtype=_TEXT, shape=_TEXT, bytes=_INTEGER, ranks=_list(_INTEGER))
_FINDING = _object(check=_TEXT, level=_words("ok", "note", "bad"), text=_TEXT, mend=_TEXT)
_EXPORTED = {"base": _TEXT, "step": _INTEGER, "bytes": _INTEGER}

_ERROR = _object({"base": _TEXT}, error=_TEXT)
"""What any of them prints where nothing could be done; the exit code is not 0 then."""

_OF_COMMAND: Final[dict[str, list[Schema]]] = {
    "ls": [
        _object(
            base=_TEXT,
            ok=_BOOL,
            live=_map(_INTEGER),
            resident_bytes=_INTEGER,
            versions=_list(_HELD_VERSION),
            leftovers=_list(_TEXT),
        ),
        _object(url=_TEXT, ok=_BOOL, versions=_list(_STORED_VERSION)),
        _object(bases=_list(_BASE)),
    ],
    "status": [_object(base=_TEXT, ranks=_list(_RANK), losses=_list(_LOSS))],
    "verify": [
        _object(
            base=_TEXT,
            ok=_BOOL,
            seconds=_NUMBER,
            objects=_INTEGER,
            bytes=_INTEGER,
            versions=_list(_VERIFIED),
            leftovers=_list(_TEXT),
        ),
        _object(url=_TEXT, ok=_BOOL, seconds=_NUMBER, versions=_list(_STORED_VERSION)),
    ],
    "inspect": [_object(source=_TEXT, step=_INTEGER, items=_list(_ITEM))],
    "diff": [
        _object(
            one=_TEXT,
            other=_TEXT,
            differences=_list(_object({"share": _NUMBER, "most": _NUMBER}, name=_TEXT, what=_TEXT)),
        )
    ],
    "report": [
        _object(
            files=_list(_TEXT),
            events=_INTEGER,
            left_out=_INTEGER,
            kinds=_map(_INTEGER),
            bases=_list(_TEXT),
            first_s=_maybe(_NUMBER),
            last_s=_maybe(_NUMBER),
            steps=_list(_object(step=_INTEGER, held=_SUM, committed=_SUM, copied=_SUM, verified=_SUM)),
            ranks=_list(_REPORT_RANK),
            recoveries=_list({"type": "object"}),
            failures=_list({"type": "object"}),
        )
    ],
    "copy": [_object(base=_TEXT, copy=_TEXT)],
    "export": [
        _object(**_EXPORTED, export=_TEXT, format=_TEXT, tensors=_INTEGER, left_out=_list(_TEXT)),
    ],
    "persist": [
        _object(**_EXPORTED, url=_TEXT, attempt=_TEXT, world_size=_INTEGER, was_there=_BOOL, newer=_maybe(_INTEGER))
    ],
    "rm": [
        _object(base=_TEXT, versions=_list(_TEXT), freed_bytes=_INTEGER, left=_list(_TEXT)),
        _object(base=_TEXT, versions=_list(_TEXT)),
    ],
    "plan": [
        _object(
            job=_map({}),
            memory=_map({}),
            ways=_list(_map({})),
            curves=_list(_object(name=_TEXT, interval_s_and_goodput=_list(_list(_NUMBER)))),
            notes=_list(_TEXT),
        )
    ],
    "doctor": [
        _object(base=_TEXT, ok=_BOOL, examined=_list(_object(name=_TEXT, findings=_list(_FINDING)))),
    ],
    "demo": [
        _object(
            ok=_BOOL,
            error=_maybe(_TEXT),
            steps=_INTEGER,
            seed=_INTEGER,
            wall_s=_NUMBER,
            runs=_list(_map({})),
            checks=_list(_object(claim=_TEXT, ok=_BOOL, why_not=_maybe(_TEXT))),
        )
    ],
}

COMMANDS: Final = tuple(_OF_COMMAND)


def schema_of(command: str) -> Schema:
    """The form of what a subcommand prints with ``--json``; for ``status --watch``, of each line.

    Raises:
        InvalidArgumentError: it prints no JSON.
    """
    if command not in _OF_COMMAND:
        raise InvalidArgumentError(f"must be one of {', '.join(COMMANDS)}", argument="COMMAND", value=command)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:ml-flashpoint:{command}:{VERSION}",
        "title": f"flashpoint {command} --json",
        "anyOf": [*_OF_COMMAND[command], _ERROR],
    }


@output.command
def show_schema(command: str) -> None:
    """Print it."""
    print(json.dumps(schema_of(command), indent=2))
