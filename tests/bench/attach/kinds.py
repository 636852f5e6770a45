"""Busy and hostile processes to inject into. Each checks its own work; `tests/support/stub.py` has the code around it."""

from tests.support.stub import EXACT

KINDS = {
    "busy": EXACT + "until_stopped(step)",
    "threads": EXACT
    + """
def forever():
    while True:
        sum(range(200))
for _ in range(4):
    threading.Thread(target=forever, daemon=True).start()
until_stopped(step)
""",
    "itimers": EXACT
    + """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.signal(signal.SIGPROF, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
until_stopped(step)
signal.setitimer(signal.ITIMER_REAL, 0)
signal.setitimer(signal.ITIMER_PROF, 0)
""",
    "signals": EXACT
    + """
seen = 0
def count(*_):
    global seen
    seen += 1
signal.signal(signal.SIGUSR1, count)
storming = True
def storm():
    while storming:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.0002)
thread = threading.Thread(target=storm)
thread.start()
until_stopped(step)
storming = False
thread.join()
assert seen
""",
    "sleep": """
def step():
    before = time.monotonic()
    time.sleep(0.01)
    assert time.monotonic() - before >= 0.01
until_stopped(step)
""",
    "select": """
import select
ours, theirs = os.pipe()
def step():
    before = time.monotonic()
    assert select.select([ours], [], [], 0.01) == ([], [], [])
    assert time.monotonic() - before >= 0.01
until_stopped(step)
""",
    "events": """
there, back = threading.Event(), threading.Event()
def answer():
    while True:
        there.wait()
        there.clear()
        back.set()
threading.Thread(target=answer, daemon=True).start()
def step():
    there.set()
    assert back.wait(60)
    back.clear()
until_stopped(step)
""",
    "malloc": """
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
def step():
    for n in range(50):
        libc.free(libc.malloc(n * 97 + 1))
    assert sum(map(len, [bytearray(n * 97) for n in range(100)])) == 97 * 4950
until_stopped(step)
""",
    "imports": """
import importlib
def step():
    for name in ("json.scanner", "json.decoder", "colorsys", "textwrap"):
        sys.modules.pop(name, None)
        assert importlib.import_module(name).__name__ == name
until_stopped(step)
""",
    "subprocess": """
import subprocess
def step():
    assert subprocess.run([sys.executable, "-I", "-S", "-c", "print(7)"], stdout=subprocess.PIPE).stdout == b"7\\n"
until_stopped(step)
""",
    "fork": """
def step():
    child = os.fork()
    if not child:
        os._exit(len(sys._current_frames()) > 1)
    assert os.waitpid(child, 0)[1] == 0
until_stopped(step)
""",
}
LEFT = """
import json, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 and newer warn of a fork beside threads
def left():
    if "hookd_last" in vars(sys):
        sys.hookd_last.purge()
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("hookd", "_hookd", "pluggy"))
    print("left", json.dumps({
        "starts": getattr(sys, "hookd_starts", 0), "modules": ours, "threads": len(sys._current_frames()) - threading.active_count(),
        "finders": len(sys.meta_path) - finders, "interval": sys.getswitchinterval() - 0.005,
    }), flush=True)
finders = len(sys.meta_path)
import atexit
atexit.register(left)
"""
