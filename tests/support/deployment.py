"""What the tests of deploy/ share: where its files are, and the tools that judge them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RIGHTS = {"SYS_PTRACE", "DAC_OVERRIDE", "CHOWN", "SYS_NICE"}
"""What was measured to be needed, and what each is for: docs/operations.md."""


def run(*command, **options):
    """Run a tool that need not be here."""
    if shutil.which(command[0]) is None and not Path(command[0]).exists():
        pytest.skip(f"no {command[0]} here")
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60, check=False, **options
    )
    return done.returncode, done.stdout + done.stderr


def tool(name):
    """Find a program that pip has put beside this Python, or that is on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def documents(text):
    return [one for one in yaml.safe_load_all(text) if one is not None]
