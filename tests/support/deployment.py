"""Shared by the tests of deploy/: where its files are, and the tools that check them."""

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
"""The capabilities that are needed, by measurement; docs/operations.md explains each."""


def run(*command, **options):
    """Run a tool that may be missing here."""
    if shutil.which(command[0]) is None and not Path(command[0]).exists():
        pytest.skip(f"no {command[0]} here")
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60, check=False, **options
    )
    return done.returncode, done.stdout + done.stderr


def tool(name):
    """Return the path of a program that pip has installed beside this Python, or that is on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def documents(text):
    return [one for one in yaml.safe_load_all(text) if one is not None]
