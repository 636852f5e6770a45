"""The output of commands with `--json`, checked against the schema in docs/reference."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from hookd.errors import ErrorAnswer
from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Sequence

OPEN = ("Incident",)
"""Types with fields that a plugin may add."""


@functools.cache
def _schema() -> dict[str, Any]:
    """Return the schema, in a form that makes an unknown field an error."""
    schema: dict[str, Any] = json.loads((REPOSITORY / "docs/reference/json.schema.json").read_text("utf-8"))
    for name, kind in schema["$defs"].items():
        if "properties" in kind and name not in OPEN:
            kind["additionalProperties"] = False
    return schema


@functools.cache
def _validator(command: str) -> Draft202012Validator:
    schema = _schema()
    known = [kind for words, kind in schema["$defs"].items() if f"{words} ".startswith(f"{command} ")]
    assert known, f"no schema for `{command} --json`: see docs/json_reference.py"
    return Draft202012Validator({**schema, **(known[0] if len(known) == 1 else {"anyOf": known})})


def check(words: Sequence[object], printed: str) -> None:
    """Raise if the output of a command does not match its schema.

    Args:
        words: the command, after `hookd`.
        printed: its stdout; it is checked only if `--json` is among the words and it is one JSON text.
    """
    texts = [str(word) for word in words]
    if "--json" not in texts or "--follow" in texts or not printed.strip():
        return
    groups = {"plugin", "config"}
    command = " ".join(["hookd", *texts[: 2 if texts[0] in groups else 1]])
    answer = json.loads(printed)
    if isinstance(answer, dict) and answer.keys() == ErrorAnswer.__annotations__.keys():
        return
    error = best_match(_validator(command).iter_errors(answer))
    assert error is None, f"`{command} --json` prints what its schema lacks: {error.json_path}: {error.message}"
