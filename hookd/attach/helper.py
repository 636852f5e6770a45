"""Start the injector, hand it one job, read its answer. Tool side."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd import errors
from hookd.errors import AttachError

if TYPE_CHECKING:
    from hookd.attach.injector import Job

# The packages are made by hand, so that neither `hookd` nor `hookd.attach` pulls in what a stop does not need; and
# without site-packages, so that nothing of the environment is loaded either.
_START = """
import sys, types
for name, path in (("hookd", {root!r}), ("hookd.attach", {root!r} + "/attach")):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [path]
from hookd.attach.injector import main
main()
"""
_MARGIN_S = 20.0


class Injector:
    """One injector process. Start it early: it gets ready while the tool looks at the target."""

    def __init__(self) -> None:
        root = str(Path(errors.__file__).parent)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _START.format(root=root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,
        )

    def run(self, job: Job) -> dict[str, Any]:
        """Give it the job and wait for its answer; once only.

        Raises:
            HookdError: what the injector says went wrong.
            OSError: EPERM or ENOSYS from ptrace.
        """
        try:
            text, _ = self._process.communicate(json.dumps(asdict(job)).encode(), job.timeout_s + _MARGIN_S)
        except subprocess.TimeoutExpired:
            self.close()
            raise AttachError(f"the injector for process {job.pid} hangs", reason="internal") from None
        try:
            answer = json.loads(text)
        except ValueError:
            code = self._process.returncode
            raise AttachError(f"the injector for process {job.pid} ended with {code}", reason="internal") from None
        if "error" in answer:
            raise _error(answer["error"])
        return dict(answer)

    def close(self) -> None:
        """End it if it is still there: it has no job then, or it does not come back from one."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def _error(told: dict[str, Any]) -> Exception:
    if told["kind"] == "OSError":
        return OSError(told["errno"], told["message"])
    return errors.rebuild(told["kind"], told["message"], told["reason"], told["hint"], AttachError)
