"""The code that a tool queues in a target: the training thread runs it, at a time that the interpreter chooses.

`hookd/tool/inject/queued_source.py` makes it short, and sets the names that are declared here; the words of the mailbox are explained in
`hookd/tool/inject/mailbox.py`. This module is never imported.

The code must not raise: the interpreter would end the process. It sets the mailbox's state, starts a thread and returns; the thread
waits for the data and executes `stub.py`. If the tool has given up or died, it frees the mailbox instead.
"""

from typing import Any

PID: int
"""Pid of the target in its own namespace."""
OURS: int
"""The token of this attach."""
BOX: int
"""Address of the mailbox; 0 if it is a file."""
FILE: Any
"""An expression that opens the mailbox if it is a file, else None."""
NAMES: tuple[str, ...]
"""Paths of files to remove."""
WAIT_S: float
"""How long the thread waits for the data, in seconds."""
# From here on: offsets in the mailbox, and values of the word `state`.
TOKEN: int
SENT: int
LENGTH: int
CANCELLED: int
SIZE: int
RAN: int
STATE: int
DATA: int
STARTS: int
NO_THREAD: int
RUNS: int
NO_MEMORY: int

try:
    import sys

    ctypes: Any = sys.modules.get("ctypes")  # if the program has not loaded it, the mailbox is accessed as a file
    import _thread  # like `posix`, loaded since the interpreter's start
    import posix

    if posix.getpid() == PID:  # a forked child inherits the queue of pending calls
        box = BOX
        word: Any = getattr(ctypes, "c_uint64", None)
        file = FILE
        if file is None and not word:
            file = posix.open("/proc/self/mem", posix.O_RDWR | posix.O_CLOEXEC)

        def get(offset: int) -> Any:
            if file is None:
                return word.from_address(box + offset).value
            return int.from_bytes(posix.pread(file, 8, box + offset), "little")

        def put(offset: int, value: int) -> None:
            if file is None:
                word.from_address(box + offset).value = value
            else:
                posix.pwrite(file, value.to_bytes(8, "little"), box + offset)

        def free() -> None:
            if file is not None:
                return posix.close(file)
            kept = DATA * (get(SENT) != get(RAN))  # the first page, as long as this code is queued once more
            unmap = ctypes.pythonapi["munmap"]
            unmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
            unmap(box + kept, get(SIZE) - kept)

        thread: Any = _thread
        if type(thread.start_new_thread) is not type(posix.getpid):
            # A library such as gevent has replaced threads by greenlets: take a second instance (see hookd/wire/originals.py).
            imp = sys.modules["_imp"]
            thread = imp.create_builtin(sys.modules["_frozen_importlib"].BuiltinImporter.find_spec("_thread"))
            imp.exec_builtin(thread)
        lock = thread.allocate_lock()  # measures time by waiting for it, because `time` may be replaced as well
        lock.acquire()

        def run() -> None:
            try:
                put(STATE, RUNS)
                for name in NAMES:
                    try:
                        posix.unlink(name)
                    except OSError:
                        pass
                left = WAIT_S
                while not get(LENGTH):
                    if get(CANCELLED) or left < 0:
                        return free()
                    lock.acquire(True, 0.001)
                    left -= 0.001
                # Without the GIL; to take it again orders, on ARM, the load of the length before those of the data.
                lock.acquire(True, 0.001)
                size = get(LENGTH)
                data = ctypes.string_at(box + DATA, size) if file is None else posix.pread(file, size, box + DATA)
                source = 16 + int.from_bytes(data[:8], "little")
                end = source + int.from_bytes(data[8:16], "little")
                stub: dict[str, Any] = {"__name__": "_hookd.target.boot.stub"}
                if data[source : source + 4] == sys.modules["_frozen_importlib_external"].MAGIC_NUMBER:
                    code = sys.modules["marshal"].loads(data[source + 4 : end])
                else:
                    code = compile(data[16:source], "hookd/target/boot/stub.py", "exec")
                lock.acquire(True, 0.01)  # leaves the interpreter to the training
                exec(code, stub)
                data = data[end:]
            except MemoryError:
                return put(STATE, NO_MEMORY)
            except BaseException:
                return
            try:
                stub["run"](data, file, box)
            except BaseException:
                pass

        # Without torch this may be a subinterpreter.
        begins = get(TOKEN) == OURS and not get(STATE) and not get(CANCELLED) and "torch" in sys.modules
        if begins:
            put(STATE, STARTS)
        put(RAN, get(RAN) + 1)
        if begins:
            stack = thread.stack_size(0)  # the default, whatever the program has set
            try:
                thread.start_new_thread(run, ())
            except RuntimeError:
                put(STATE, NO_THREAD)
                if file is not None:
                    posix.close(file)
            finally:
                thread.stack_size(stack)
        elif get(CANCELLED) and get(STATE) in (0, NO_THREAD, NO_MEMORY) and get(SENT) == get(RAN):
            free()  # the tool has given up or died, no thread uses the mailbox, and nothing is queued any more
        elif file is not None:
            posix.close(file)
except BaseException as error:
    # One that a signal handler of the program raises while these lines run (to be preempted, say) belongs to the program:
    # it is raised in the training thread by a second queued call, PyObject_IsTrue of an object whose `__bool__` raises it.
    # One of our own is known by the last frame of its traceback, whose globals are those of this code.
    try:
        last: Any = error.__traceback__
        while last.tb_next:
            last = last.tb_next
        if isinstance(error, KeyboardInterrupt) or last.tb_frame.f_globals is not globals():

            class Raises:
                def __bool__(self, error: BaseException = error) -> bool:
                    raise error

            raises = Raises()
            ctypes.pythonapi["Py_IncRef"](ctypes.py_object(raises))
            ctypes.pythonapi["Py_AddPendingCall"](ctypes.pythonapi["PyObject_IsTrue"], ctypes.c_void_p(id(raises)))
    except BaseException:
        pass
