"""docs/security.md: each claim names tests, and attacks if there are any, and all of these exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from hookd.tool.daemon.metrics import scrapes
from hookd.tool.daemon.web import passwords, tcp
from hookd.tool.daemon.web import site as routes
from tests.attacks.__main__ import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
CLAIMS = [
    row.strip("| ").split(" | ", 1)
    for table in re.findall(r"^\| property \| verified by \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for row in table.splitlines()
]


@functools.cache
def names_in(path):
    """The names of a file's tests that are run by `make test`."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {one.name for one in functions if not any("mark.load" in ast.unparse(mark) for mark in one.decorator_list)}


def test_there_are_claims_of_each_kind_of_attacker():
    assert len(CLAIMS) > 40
    assert all(len(row) == 2 for row in CLAIMS)
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", PAGE, re.MULTILINE))
    tables = {head: text.count("\n| property | verified by |\n") for head, text in sections.items()}
    assert tables.pop("Attacks") == tables.pop("What is not promised") == 0
    assert set(tables.values()) == {1}, tables


def test_the_table_of_attacks_is_that_of_the_attacks():
    before, _, rest = PAGE.partition("<!-- begin attacks -->\n")
    table, end, _ = rest.partition("<!-- end attacks -->\n")
    assert end
    assert before.rpartition("\n## ")[2].startswith("Attacks\n")
    rows = [line.split(" | ")[0].strip("| ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert set(rows) <= {re.sub(r"\s+", " ", one.title) for one in load().values()}


@pytest.mark.parametrize(("claim", "verified_by"), CLAIMS, ids=[claim[:40] for claim, _ in CLAIMS])
def test_a_claim_is_verified_by_tests_that_exist(claim, verified_by):
    words = verified_by.split(", ")
    named = [found.groups() for word in words if (found := re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", word))]
    attacks = [found[1] for word in words if (found := re.fullmatch(r"`attack:(\w+)`", word))]
    assert named or attacks, claim  # `make test` makes most attacks, `make long` all
    assert len(named) + len(attacks) == len(words), verified_by
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
    assert not missing
    assert set(attacks) <= set(load())


def test_the_limits_are_those_that_stand_there():
    limits = tcp.Limits()
    assert f"| connections | {limits.connections} at a time" in PAGE
    assert f"| TLS handshake | {limits.handshake_s:g} s |" in PAGE
    assert (
        f"| {limits.header_s:g} s from the first byte; {tcp.MAX_LINE >> 10} KiB, {(tcp.MAX_FIELD + 2) >> 10} KiB for"
        in PAGE
    )
    assert f"| idle | {limits.idle_s:g} s |" in PAGE
    assert f"| a reader that takes nothing | {limits.sending_s:g} s |" in PAGE
    assert f"{scrapes.MAX_WAITING} that wait with `name[]`, {routes.MAX_SENDING} texts that are being sent |" in PAGE
    assert (passwords.GUESSES, passwords.GUESSES_PER_S) == (10, 1.0)
