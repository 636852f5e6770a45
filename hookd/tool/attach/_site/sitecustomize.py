# ruff: noqa: ANN001, ANN002, ANN003, ANN202, ANN204, F401, INP001, PLW0406
# mypy: ignore-errors
"""Start hookd's agent in the training processes of a command, under `hookd run`.

All Pythons that the command starts run this file: they find it through PYTHONPATH. They may have any version and
purpose. So it is written for 2.7 and newer, never raises, loads the sitecustomize that would have been found without
it, and does nothing in processes that cannot train. The parent of its directory contains:

    config.json  the agent's configuration        stub.py     hookd/target/boot/stub.py
    payload      the agent and the plugins        commandline.py hookd/tool/linux/commandline.py
    started      exists once an agent has started failed-PID     the error in a process, for the tool to report
"""

import os
import sys

if sys.version_info >= (3,):  # noqa: UP036
    from _thread import get_ident
    from _weakref import ref


class _AfterTorch(object):  # noqa: UP004  Python 2
    """A meta path finder that calls a function when torch has been loaded completely.

    A request for a spec is not yet an import: transformers and accelerate check for torch long before they import it. So
    every returned loader is wrapped to call the function after its next run. The first loader that runs unwraps the
    others.
    """

    def __init__(self, action):
        self.action = action
        self.asking = set()
        self.loaders = []

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        thread = get_ident()
        if name != "torch" or thread in self.asking:
            return None
        from importlib.util import find_spec  # noqa: PLC0415

        self.asking.add(thread)
        try:
            spec = find_spec(name)
        finally:
            self.asking.discard(thread)
        try:  # noqa: SIM105
            self.wrap(spec.loader)
        except Exception:  # noqa: BLE001, S110  no torch, or an unknown kind of loader: the import goes on without hookd
            pass
        return spec

    def wrap(self, loader):
        """Call the function after the loader's next run, by an instance attribute that shadows the method."""
        self.loaders = [(reference, before) for reference, before in self.loaders if reference() is not None]
        if any(reference() is loader for reference, _ in self.loaders):
            return
        exec_before, before = loader.exec_module, vars(loader).get("exec_module")

        def exec_module(module):
            if module.__name__ != "torch":  # a loader of many modules, such as zipimport's
                return exec_before(module)
            self.leave()
            try:
                exec_before(module)
            except BaseException:
                self.enter()  # the import may be tried again
                raise
            return self.action()

        loader.exec_module = exec_module
        self.loaders.append((ref(loader), before))

    def enter(self):
        sys.meta_path = [self] + sys.meta_path  # noqa: RUF005  Python 2

    def leave(self):
        """Restore the import system."""
        # Never change the list in place: another thread that imports meanwhile iterates over it, and would miss a finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        for reference, before in self.loaders:
            loader = reference()
            if loader is not None:
                del loader.exec_module
                if before is not None:
                    loader.exec_module = before
        self.loaders = []


def _role(directory):
    """Return the role of this process: "trainer", "spawned" (multiprocessing started it), or "" for any other."""
    words = list(getattr(sys, "orig_argv", ()))
    line = _load(directory, "commandline")
    if line["helper"](words) or line["is_launcher"](words):
        return ""
    text = "\0".join(words)
    return "spawned" if "multiprocessing.spawn" in text or "multiprocessing.forkserver" in text else "trainer"


def _read(directory, name):
    with open(os.path.join(directory, name), "rb") as file:  # noqa: PTH118, PTH123
        return file.read()


def _load(directory, name):
    """Return the namespace of a file of hookd, without making it a module."""
    defined = {"__name__": "_hookd." + name}
    exec(compile(_read(directory, name + ".py"), "hookd/" + name + ".py", "exec"), defined)  # noqa: S102
    return defined


def _when_spawned(action):
    """Call a function in a child of multiprocessing before its target runs, unless it is a data loader's worker."""
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
        _AfterTorch(action).enter()


def _starter(directory):
    def start():
        try:
            _start(directory)
        except BaseException as exc:  # noqa: BLE001  the program must not notice; the tool reports the error
            _record_failure(directory, exc)

    return start


def _start(directory):
    import json  # noqa: PLC0415

    stub = _load(directory, "stub")
    stub["start"](json.loads(_read(directory, "config.json").decode()), _read(directory, "payload"))
    _note(directory, "started", "")


def _record_failure(directory, exc):
    _note(directory, "failed-%d" % os.getpid(), "%s: %s" % (type(exc).__name__, exc))  # noqa: UP031


def _note(directory, name, text):
    try:
        with open(os.path.join(directory, name), "w") as file:  # noqa: PTH118, PTH123
            file.write(text)
    except Exception:  # noqa: BLE001, S110
        pass


def _prepare(here):
    is_served = sys.version_info >= (3, 10) and sys.implementation.name == "cpython"
    if not is_served or os.environ.get("HOOKD_DISABLE", "") not in ("", "0"):
        return
    directory = os.path.dirname(here)  # noqa: PTH120
    role = _role(directory)
    if role == "trainer":
        _when_imported(_starter(directory))
    elif role == "spawned":
        _when_spawned(_starter(directory))


_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
try:  # noqa: SIM105  no contextlib.suppress in Python 2
    _prepare(_here)
except Exception:  # noqa: BLE001, S110  the program must not notice
    pass

# Import the sitecustomize that would have been found without ours. At module level, so that a traceback of it shows only one line
# of ours.
_ours = sys.modules.pop("sitecustomize", None)
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]  # noqa: PTH100
try:
    import sitecustomize
except ImportError as exc:
    if getattr(exc, "name", "sitecustomize") != "sitecustomize":
        raise
finally:
    if _ours is not None:
        sys.modules.setdefault("sitecustomize", _ours)
