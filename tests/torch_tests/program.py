"""How one of torch's test files is started in each mode."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from tests.support.environment import REPOSITORY, target_environment, tool_environment
from tests.support.processes import Process
from tests.support.tool import HOOKD, plugin_options

if TYPE_CHECKING:
    from tests.torch_tests.place import Place

PLAIN, IN_PROCESS, RUN, ATTACHED = MODES = ("plain", "in process", "hookd run", "attached")
AGAIN = "plain again"
UNOBSERVED = (PLAIN, AGAIN)
PLUGINS = ("activations", "coverage", "drift", "memory", "nan", "optimizer", "timing")
"""Every plugin of hookd's that only looks; each looks at every step."""
OBSERVERS = plugin_options([f"{name}:every=1" for name in PLUGINS])
WITHOUT_LIMIT = {"HOOKD_BUDGET": "1"}
PYTEST = "-q -p no:cacheprovider -p no:randomly -p no:hookd.testing.fixtures -p torch_tests_recorder --disable-warnings -o addopts=".split()


class Program:
    """pytest on one file of torch's tests.

    Args:
        place: where it runs.
        tests: the directory `test` of torch's sources, below the working directory.
    """

    def __init__(self, place: Place, tests: Path) -> None:
        self.place, self._tests = place, tests
        self._home, self._library, self._plugin = (place.work / name for name in ("home", "library", "recorder"))
        self._home.mkdir()
        self._plugin.mkdir()
        shutil.copy(Path(__file__).with_name("recorder.py"), self._plugin / "torch_tests_recorder.py")
        _install(self._library)

    def start(self, file: str, mode: str, directory: Path) -> Process:
        """Start it; the recorder writes `lines` in the directory, and waits there where somebody is to come."""
        command = self.place.command("env", f"--chdir={self._tests}", self.place.python, "-m", "pytest", *PYTEST, file)
        environment = self._environment(mode, directory)
        if mode == RUN:
            return Process(
                [*HOOKD, "run", *OBSERVERS, "--", *command], env=tool_environment(**WITHOUT_LIMIT) | environment
            )
        return Process(command, env=environment)

    def _environment(self, mode: str, directory: Path) -> dict[str, str]:
        path = [self._plugin, *([self._library] if mode == IN_PROCESS else [])]
        (temporary := directory / "tmp").mkdir()
        environment = target_environment(
            HOME=self._home,
            TMPDIR=temporary,
            PYTHONPATH=os.pathsep.join(map(str, path)),
            PYTHONFAULTHANDLER="1",
            PYTHONDONTWRITEBYTECODE="",  # a file of 10,000 lines takes longer to compile than to test
            TORCHINDUCTOR_CACHE_DIR=directory / "inductor",
            TORCH_TESTS_LINES=directory / "lines",
            TORCH_TESTS_DONE=directory / "done",
        )
        if mode not in UNOBSERVED:
            environment["TORCH_TESTS_HOLD"] = str(directory)
        if mode == IN_PROCESS:
            environment["TORCH_TESTS_START"] = json.dumps([(name, {"every": 1}) for name in PLUGINS])
        return environment


def _install(directory: Path) -> None:
    """Install hookd, built from this tree, and pluggy, as files that any Python can import."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", directory, REPOSITORY], check=True)
    for source in (
        Path(pluggy.__file__).parent,
        Path(str(metadata.distribution("pluggy").locate_file(f"pluggy-{metadata.version('pluggy')}.dist-info"))),
    ):
        shutil.copytree(source, directory / source.name)
