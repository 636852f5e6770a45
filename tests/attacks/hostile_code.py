"""The code of hostile plugins and plugin files, for `authors.py`. Each value is the text of one file."""

HEAD = """
import ctypes, gc, os, signal, subprocess, sys, threading, time
import torch
from hookd import Plugin, hookimpl
"""
HOOK = """
class Hostile(Plugin):
    '''A hostile one.'''
    name = "hostile"
    calls = 0

    @hookimpl
    def forward(self, module):
        Hostile.calls += 1
        self.act()
"""


def in_hook(act: str) -> str:
    """Return the text of a plugin that does something at each module call."""
    return f"{HEAD}{HOOK}\n    def act(self):\n" + "".join(f"        {line}\n" for line in act.strip().splitlines())


def at_import(what: str) -> str:
    """Return the text of a plugin that, when imported, leaves a file `it-ran` beside itself and then does something."""
    text = f"import pathlib\n(pathlib.Path(__file__).parent / 'it-ran').touch()\n{what.strip()}\n"
    return f"{HEAD}exec({text!r})  # in a text, or mypy would find mistakes in it\n{HOOK}\n    def act(self): pass\n"


CODE = {
    "forks a process into a session of its own": at_import("""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(2)
        time.sleep(600)
    os._exit(0)
"""),
    "writes without end": at_import("while True: os.write(2, b'x' * (1 << 20))"),
    "ends the process at import": at_import("os._exit(0)"),
    "loops for ever at import": at_import("while True: pass"),
    "prints what a terminal obeys": at_import("raise ValueError('\\x1b]0;owned\\x07\\x1b[2J\\x9b31m')"),
    "kills its parent and its group": at_import("os.kill(os.getppid(), 9); os.kill(0, 9)"),
    "answers in hookd's place with a gigabyte": at_import("""
import json
for one in json.loads(sys.argv[1])['plugins']:
    with open(one['out'], 'wb') as file: file.truncate(1 << 30)
os._exit(0)
"""),
    "answers in hookd's place with what is none": at_import("""
import json
for one in json.loads(sys.argv[1])['plugins']:
    with open(one['out'], 'w') as file: file.write('[' * 100_000)
os._exit(0)
"""),
}
"""Acts of code that `hookd plugin check` runs."""

TRAINING = {
    "raises BaseException": "raise BaseException('of its own')",
    "raises GeneratorExit": "raise GeneratorExit",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "forks, and the child goes on into the training": "if Hostile.calls == 20 and os.fork() == 0: os._exit(0)",
    "keeps memory": "self.__dict__.setdefault('kept', []).append(torch.zeros(1 << 20))",
    "turns off gradients": "torch.set_grad_enabled(False)",
    "sleeps for ever": "if Hostile.calls == 20: time.sleep(1e6)",
    "seeds": "torch.manual_seed(1)",
    "draws random numbers": "torch.randn(3)",
    "sets the default dtype": "torch.set_default_dtype(torch.float64)",
    "demands deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "sets the number of threads": "torch.set_num_threads(2)",
}
"""Acts of a plugin at each module call of a real training."""
