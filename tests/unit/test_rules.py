"""The processes that the rules of a configuration choose, and the messages on faulty rules."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hookd.errors import ConfigError
from hookd.tool import config
from hookd.tool.attach import environment
from hookd.tool.attach.discover import Candidate
from hookd.tool.attach.launch import is_launched
from hookd.tool.config.rules import ASKED_FOR, Rule, Traits, decide
from hookd.tool.daemon.auto_attach import AutoAttach
from hookd.tool.linux import proc

TRAITS = Traits(
    "python -u /data/alice/train.py --lr 0.1", frozenset(["alice", "1000"]), "/kubepods/pod7/abc", {"TEAM": "vision-2"}
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "hookd.toml"
COMMENTED_OUT = re.compile(r"^# (?=\[|\w+ = )", re.MULTILINE)


@pytest.mark.parametrize(
    ("rule", "is_chosen"),
    [
        (Rule(match="train.py"), True),
        (Rule(match="*train.py*0.1"), True),
        (Rule(match="test.py"), False),
        (Rule(user="alice"), True),
        (Rule(user="1000"), True),
        (Rule(user="bob"), False),
        (Rule(user="ali"), False),
        (Rule(user="100"), False),
        (Rule(cgroup="/kubepods*"), True),
        (Rule(cgroup="pod7"), True),
        (Rule(cgroup="/system.slice*"), False),
        (Rule(environment={"TEAM": "vision-*"}), True),
        (Rule(environment={"TEAM": "vision"}), False),
        (Rule(environment={"OTHER": "*"}), False),
        (Rule(match="train.py", user="bob"), False),
        (Rule(match="train.py", attach=False), False),
    ],
)
def test_a_rule_chooses_where_all_its_conditions_hold(rule, is_chosen):
    assert (decide((rule,), TRAITS) is rule) == is_chosen


@pytest.mark.parametrize(
    ("path", "is_one"), [("/tmp/hookd-run-ab1/site:/data", True), ("/data:/tmp/hookd-run-ab1", False), ("", False)]
)
def test_a_process_of_hookd_run_is_recognized_by_its_pythonpath(path, is_one):
    assert is_launched({"PYTHONPATH": path} if path else {}) == is_one


def test_the_first_rule_that_fits_decides_and_the_process_itself_may_ask():
    first, second = Rule(match="train.py", attach=False), Rule(user="alice")
    assert decide((first, second), TRAITS) is None
    assert decide((second, first), TRAITS) is second
    asks = Traits("python x.py", frozenset(), "", {"HOOKD": "1"})
    assert decide((), asks) is not None
    assert decide((Rule(match="x.py", attach=False),), asks) is None
    assert decide((), Traits("python x.py", frozenset(), "", {"HOOKD": "0"})) is None


def test_no_rule_is_asked_about_a_process_whose_environment_nobody_knows_and_that_is_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(environment, "of", lambda _: None)
    wanted = AutoAttach((Rule(match="*"),), lambda *_: False, lambda: 1e9)
    pid = os.getpid()
    one = Candidate(pid, proc.start_ticks(pid), ("python", "train.py"), os.getuid(), "attachable")
    for _ in range(3):
        wanted.see([one])
        wanted.prune()
    assert wanted.due() == []
    (line,) = caplog.messages
    assert f"process {pid} of user" in line
    assert f"`hookd attach {pid}`" in line


def test_a_rule_names_itself_by_its_number_and_what_it_asks_for():
    rule = Rule(match="train.py", user="alice", environment={"TEAM": "v*"}, number=2)
    assert rule.description == "rule 2 (match=train.py, user=alice, TEAM=v*)"
    assert ASKED_FOR.description == "HOOKD=1 of its environment"


def test_rules_are_read_from_the_file(tmp_path):
    path = tmp_path / "hookd.toml"
    path.write_text(
        '[[rule]]\nmatch = "a"\nplugins = ["nan:every=2"]\n[[rule]]\nuser = 7\nattach = false\n'
        '[[rule]]\nenvironment = { A = 1, B = "x*" }\n'
    )
    first, second, third = config.check(path).rules
    assert (first.match, [str(spec) for spec in first.plugins], first.attach) == ("a", ["nan:every=2"], True)
    assert (second.user, second.attach) == ("7", False)
    assert [first.number, second.number, third.number] == [1, 2, 3]
    assert third.environment == {"A": "1", "B": "x*"}


def test_the_example_attaches_to_nothing_by_itself():
    assert config.check(EXAMPLE).rules == ()


def test_the_rules_of_the_example_are_valid_and_name_whose_processes_they_attach_to(tmp_path):
    path = tmp_path / "hookd.toml"
    path.write_text(COMMENTED_OUT.sub("", EXAMPLE.read_text()).partition("[[webhook]]")[0])
    rules = config.check(path).rules
    assert len(rules) == 3
    assert all(rule.user for rule in rules if rule.attach)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[rule]]\nmatsh = "a"', "did you mean 'match'"),
        ("[[rule]]\nattach = true", "no condition"),
        ("[[rule]]\nmatch = 3", "is not a text"),
        ("[[rule]]\nuser = true", "is not a user"),
        ('[[rule]]\nenvironment = "A=1"', "is not a table of variables"),
        ("[[rule]]\nenvironment = { A = [1] }", "plain values"),
        ('[[rule]]\nmatch = "a"\nattach = "no"', "neither true nor false"),
        ('[[rule]]\nmatch = "a"\nplugins = ["Nan"]', "plugin's name"),
        ('[rule]\nmatch = "a"', "write [[rule]]"),
    ],
)
def test_a_mistake_in_a_rule_is_named_with_the_rule_and_all_at_once(tmp_path, text, words):
    path = tmp_path / "hookd.toml"
    path.write_text(f'{text}\n[serve]\nlinger_s = "x"\n')
    with pytest.raises(ConfigError) as caught:
        config.check(path)
    first, *others = caught.value.message.splitlines()
    assert words in first
    assert str(path) in first
    assert "rule" in first
    assert any("linger_s" in other for other in others)
