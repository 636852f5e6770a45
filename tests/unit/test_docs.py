"""The documentation: its site builds without a warning, no link is dead, and generated parts match the code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from jsonschema import Draft202012Validator

from hookd.tool.cli import cli
from tests.support.documents import anchors, generator, links, pages
from tests.support.environment import REPOSITORY
from tests.support.reasons import reasons

REFERENCE = REPOSITORY / "docs" / "reference"
TROUBLES = REPOSITORY / "docs" / "troubleshooting.md"
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//|<link\b[^>]*\bhref=\"(?:https?:)?//[^>]*>"
)


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, cwd=REPOSITORY)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, and the output of its build."""
    directory = tmp_path_factory.mktemp("site")
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    code, output = run(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", directory)
    assert code == 0, output
    return directory, output


def test_the_site_is_made_without_a_warning(site):
    assert not re.findall(r"^(?:WARNING|ERROR).*", site[1], re.MULTILINE)


def test_every_page_is_on_the_site_and_nothing_on_it_comes_from_elsewhere(site):
    directory, _ = site
    made = {str(path.relative_to(directory)) for path in directory.rglob("*.html")}
    docs = REPOSITORY / "docs"
    assert {str(path.relative_to(docs).with_suffix(".html")) for path in docs.rglob("*.md")} <= made
    assert {"index.html", "plugins/index.html", "CHANGELOG.html", "files/examples/hookd.toml.html"} <= made
    for path in directory.rglob("*.html"):
        text = path.read_text("utf-8")
        assert not LOADED.search(text), path
        assert not re.search(r"<p>[^<]*\n(?:- |\d\. |\|)", text), f"{path}: a list or table that has become text"


def test_a_link_leads_out_of_the_docs_to_what_it_names(site):
    text = (site[0] / "attach.html").read_text("utf-8")
    assert 'href="files/examples/hookd.toml.html"' in text
    assert 'href="plugins/index.html' in (site[0] / "incidents.html").read_text("utf-8")
    assert "[[rule]]" in (site[0] / "files/examples/hookd.toml.html").read_text("utf-8")


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_work_on_a_code_host_as_well(page):
    for target, anchor in links(page):
        assert target.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(target), f"{page}: {target}#{anchor}"


def test_what_the_code_says_is_written_as_it_says_it(tmp_path):
    code, output = run(sys.executable, REPOSITORY / "docs" / "generate.py", tmp_path)
    assert code == 0, output
    made = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text("utf-8") for path in REFERENCE.iterdir()}, (
        "old: run python docs/generate.py"
    )


def test_every_command_that_prints_json_has_a_schema():
    defined = json.loads((REFERENCE / "json.schema.json").read_text("utf-8"))
    Draft202012Validator.check_schema(defined)
    missing = []
    for words, command in generator().walk(cli, ("hookd",)):
        if any("--json" in option.opts for option in command.params) and words[1] != "run":
            missing += (
                [words] if not any(f"{one} ".startswith(f"{' '.join(words)} ") for one in defined["$defs"]) else []
            )
    assert not missing, "see OUTPUTS in docs/json_reference.py"


# ---- troubleshooting


def rows():
    """Yield reason and messages of each row."""
    for line in TROUBLES.read_text("utf-8").splitlines():
        if found := re.match(r"\| `([\w-]+)` \|(.*?)\| (.+) \|$", line):
            yield found[1], [part.strip() for part in found[2].split(";") if part.strip()], found[3]


def test_troubleshooting_has_every_reason_of_an_error_and_no_other():
    assert sorted(reason for reason, *_ in rows()) == sorted(reasons())


def test_troubleshooting_has_the_words_that_are_printed():
    known = reasons()
    for reason, reported, _ in rows():
        for message in reported:
            pattern = ".*?".join(re.escape(part) for part in message.split("…"))
            assert any(re.search(pattern, one) for one in known[reason]), f"no error with {reason} says: {message}"


def test_a_reason_is_found_wherever_it_is_given():
    found = reasons()
    assert {"yama", "data-worker", "already-attached", "agent-failed", "stopped", "traced", "not-reproduced"} <= set(
        found
    )
    assert "Yama forbids ptrace on process …" in found["yama"]


def test_nothing_of_the_machine_is_in_the_help_pages():
    text = (REFERENCE / "commands.md").read_text("utf-8")
    assert os.path.expanduser("~") not in text
    assert os.uname().nodename not in text
