"""The file system in which torch's tests run: this one, or a root of its own, entered in a private mount namespace.

A root is not changed: its /tmp and /dev/shm are replaced for the time of a run by empty ones, and the working directory is
mounted there under the path that it has here, so that paths mean the same on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.environment import target_environment

HERE = Path("/")
ENTER = """
set -e; root=$1 work=$2; shift 2
mount -t proc proc "$root/proc"
for directory in /tmp /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs "$root$directory"; done
mkdir -p "$root$work"; mount --bind "$work" "$root$work"
if [ -e "$root/etc/resolv.conf" ]; then mount --bind /etc/resolv.conf "$root/etc/resolv.conf"; fi
exec chroot "$root" "$@"
"""
NEEDED = {"torch": "python3-torch", "pytest": "python3-pytest", "expecttest": "python3-expecttest",
          "hypothesis": "python3-hypothesis", "setuptools": "python3-setuptools"}  # fmt: skip
"""What torch's tests import, and the Debian packages that have it."""
ABOUT = """
import importlib.util as u, json, platform, sys
missing = [name for name in sys.argv[1:] if u.find_spec(name) is None]
if not missing:
    import torch
    print(json.dumps([platform.python_version(), torch.__version__]))
else:
    print(json.dumps(missing), file=sys.stderr); sys.exit(3)
"""


@dataclass(frozen=True)
class Place:
    """A root and a working directory below /tmp that both sides see.

    Attributes:
        root: of the file system in which the tests run; "/" for this one.
        work: the working directory.
        python: the interpreter there.
    """

    root: Path
    work: Path
    python: str

    def command(self, *words: str | Path) -> list[str]:
        """Return the command that runs another one in the root; it keeps its pid."""
        if self.root == HERE:
            return [str(word) for word in words]
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]
        return [*enter, str(self.root), str(self.work), *map(str, words)]

    def output(self, *words: str | Path) -> str:
        """Run a command in the root to its end and return its stdout.

        Raises:
            subprocess.CalledProcessError: it failed; has its stderr.
        """
        command = self.command(*words)
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=600, env=target_environment()
        )
        return done.stdout

    def versions(self) -> tuple[str, str]:
        """Return the versions of Python and torch.

        Raises:
            SystemExit: something that torch's tests need is not there.
        """
        try:
            python, torch = json.loads(self.output(self.python, "-c", ABOUT, *NEEDED))
        except subprocess.CalledProcessError as exc:
            packages = " ".join(NEEDED.values())
            raise SystemExit(
                f"{self.root}: not installed: {exc.stderr.strip()}\nOn Debian: apt-get install {packages}"
            ) from exc
        return python, torch


def at(root: Path, work: Path) -> Place:
    """Return the place for a root: Debian's Python in it, or the running one in this."""
    return Place(root, work, "/usr/bin/python3" if root != HERE else sys.executable)
