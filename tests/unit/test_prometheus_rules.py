"""The rules for Prometheus in deploy/ are right, and find what they must: promtool, with tests of their own."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.environment import REPOSITORY

RULES = REPOSITORY / "deploy" / "prometheus" / "rules"
pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (Debian: prometheus)")


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], cwd=RULES, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rules", sorted(one.name for one in RULES.glob("*.rules.yml")))
def test_rules_are_valid_and_pass_their_own_tests(rules):
    promtool("check", "rules", rules)
    promtool("test", "rules", f"../tests/{rules.replace('.rules.yml', '.test.yml')}")
