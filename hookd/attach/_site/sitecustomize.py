# ruff: noqa: ANN001, ANN002, ANN003, ANN202, ANN204, INP001
# mypy: ignore-errors
"""Start hookd's agent in the training processes of a command, under `hookd run`. Runs in every Python of it.

Found through PYTHONPATH by all Pythons that the command starts, of any version and for any purpose: so it is written
for 2.7 and newer, never raises, gives way to the sitecustomize that would have been found without it, and does nothing
where no training can be. Beside its own directory lie:

    config.json  the agent's configuration        arrival.py hookd/agent/arrival.py
    payload.zip  the agent and the plugins        failed-PID what went wrong in a process, for the tool to tell
"""

import os
import sys


class _AfterTorch(object):  # noqa: UP004  Python 2
    """A meta path finder that waits for `import torch` and calls a function when it is complete."""

    def __init__(self, action):
        self.action = action

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        if name != "torch":
            return None
        # Never in place: another thread that imports meanwhile goes through this list, and would miss a finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        from importlib.util import find_spec  # noqa: PLC0415

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self.wrap(spec.loader)
        return spec

    def wrap(self, loader):
        """Set the function behind the loader's next run. An attribute of the instance: nothing of it stays."""
        action = self.action

        def exec_module(module):
            del loader.exec_module
            loader.exec_module(module)
            action()

        loader.exec_module = exec_module


def _chain(here):
    """Import the sitecustomize that would have been found without ours; take our directory off the path for good."""
    ours = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # noqa: PTH100
    try:
        import sitecustomize  # noqa: F401, PLC0415, PLW0406
    except ImportError as exc:
        if getattr(exc, "name", "sitecustomize") != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


def _role():
    """Say what this process is: "trainer", "spawned" (multiprocessing started it), or "" for none of these."""
    words = list(getattr(sys, "orig_argv", ()))
    text = "\0".join(words)
    for mark in (
        "multiprocessing.resource_tracker",
        "torch._inductor.compile_worker",
        "torch/_inductor/compile_worker",
    ):
        if mark in text:
            return ""
    if "multiprocessing.spawn" in text or "multiprocessing.forkserver" in text:
        return "spawned"
    for i, word in enumerate(words[1:4]):
        name = word.rpartition("/")[2]
        is_module = words[i] == "-m"
        if is_module and word in ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"):
            return ""
        if not is_module and name in ("torchrun", "accelerate", "deepspeed"):
            return ""
    return "trainer"


def _when_spawned(action):
    """Call a function in a child of multiprocessing before its work starts, unless it is a data loader's worker."""
    from multiprocessing.process import BaseProcess  # noqa: PLC0415

    original = BaseProcess._bootstrap  # noqa: SLF001

    def _bootstrap(self, *args, **kwargs):
        BaseProcess._bootstrap = original  # noqa: SLF001
        target = getattr(self, "_target", None)
        if "torch.utils.data" not in (getattr(target, "__module__", None) or ""):
            _when_imported(action)
        return original(self, *args, **kwargs)

    BaseProcess._bootstrap = _bootstrap  # noqa: SLF001


def _when_imported(action):
    if hasattr(sys.modules.get("torch"), "nn"):
        action()
    else:
        sys.meta_path = [_AfterTorch(action)] + sys.meta_path  # noqa: RUF005  Python 2


def _starter(directory):
    def start():
        try:
            _start(directory)
        except BaseException as exc:  # noqa: BLE001  the program must not notice; the tool tells
            _tell(directory, exc)

    return start


def _start(directory):
    import json  # noqa: PLC0415

    def read(name):
        with open(os.path.join(directory, name), "rb") as file:  # noqa: PTH118, PTH123
            return file.read()

    arrival = {"__name__": "hookd.agent.arrival"}
    exec(compile(read("arrival.py"), "hookd/agent/arrival.py", "exec"), arrival)  # noqa: S102
    arrival["start"](json.loads(read("config.json").decode()), read("payload.zip"))


def _tell(directory, exc):
    try:
        text = "%s: %s" % (type(exc).__name__, exc)  # noqa: UP031
        with open(os.path.join(directory, "failed-%d" % os.getpid()), "w") as file:  # noqa: PTH118, PTH123, UP031
            file.write(text)
    except Exception:  # noqa: BLE001, S110
        pass


def _prepare(here):
    is_served = sys.version_info >= (3, 10) and sys.implementation.name == "cpython"
    if not is_served or os.environ.get("HOOKD_DISABLE", "") not in ("", "0"):
        return
    role, directory = _role(), os.path.dirname(here)  # noqa: PTH120
    if role == "trainer":
        _when_imported(_starter(directory))
    elif role == "spawned":
        _when_spawned(_starter(directory))


_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
try:  # noqa: SIM105  no contextlib.suppress in Python 2
    _prepare(_here)
except Exception:  # noqa: BLE001, S110  the program must not notice
    pass
_chain(_here)
