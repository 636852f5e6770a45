"""The mailbox: control words, the injected code and the payload, shared with the target.

The tool and the injector use this module. The mailbox is private memory of the target, which the tool reads and writes through
`memory.py`. If the target is not stopped (CPython 3.14), it is a file that both sides read and write. Each word has one writer.

    0    token      tool    the injected code acts only if this equals its own token
    8    sent       tool    how often the code was queued
    16   length     tool    bytes of data, written after the data
    24   seen       tool    the answer was read
    32   cancelled  tool    the tool no longer waits; its last write, because the target may now free the mailbox
    40   size       tool    of the whole mailbox, in bytes
    64   ran        target  how often the code ran, whatever the token; written after `claimed`
    72   claimed    target  1 before the thread starts, 2 if it could not start, 3 once it runs, 4 if it gets no memory
    80   answered   target  bytes of the answer, written after the answer
    128  the code, a C string
    4096 the data, later replaced by the answer

The data are: the lengths of `hookd/target/boot/stub.py` as source and as compiled code, both of these, the length of the request,
the request as JSON, the payload.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.tool.linux.memory import Memory

TOKEN, SENT, LENGTH, SEEN, CANCELLED, SIZE = 0, 8, 16, 24, 32, 40
RAN, CLAIMED, ANSWERED = 64, 72, 80
CODE, DATA = 128, 4096
NO_THREAD, RUNS, NO_MEMORY = 2, 3, 4
"""Values of `claimed`."""
UNCLAIMED = frozenset({0, NO_THREAD, NO_MEMORY})
"""Values of `claimed` with which no thread of the target uses the mailbox."""
_MAX_ANSWER = 65536

# The code that the training thread runs, at a time that the interpreter chooses. It must not raise: the interpreter would end
# the process. Its steps:
# - It compares the pid, because a forked child inherits the queue of pending calls.
# - It checks that torch is loaded, because it may run in a subinterpreter.
# - It claims the mailbox, starts a thread with the default stack size, whatever size the program has set, and returns.
# It imports only modules that are loaded since the interpreter's start. If a library such as gevent has replaced threads by
# greenlets, the thread comes from a second instance of `_thread` (see `hookd/wire/originals.py`). The thread measures time by
# waiting for a lock, because `time` may be replaced as well. If ctypes is not loaded, the mailbox is accessed as a file.
#
# If the tool has given up or died, the target frees the mailbox. The thread does so after its timeout. Code that runs only after
# the tool has cancelled does so at once, provided that nothing is queued any more and the mailbox is unclaimed, no thread could be
# started, or the thread got no memory.
#
# An exception that a signal handler of the program raises while these lines run belongs to the program (a preemption signal,
# say). It is raised in the training thread by a second queued call: PyObject_IsTrue of an object whose `__bool__` raises it. An
# exception of our own is recognized by the last frame of its traceback, whose globals are those of this code.
_CODE = """
try:
 import sys
 C=sys.modules.get('ctypes')
 import posix,_thread
 if posix.getpid()==@PID@:
  B=@BOX@
  U=getattr(C,'c_uint64',None)
  F=@FILE@
  if F is None and not U:F=posix.open('/proc/self/mem',posix.O_RDWR|posix.O_CLOEXEC)
  def g(o):return U.from_address(B+o).value if F is None else int.from_bytes(posix.pread(F,8,B+o),'little')
  def p(o,v):
   if F is None:U.from_address(B+o).value=v
   else:posix.pwrite(F,v.to_bytes(8,'little'),B+o)
  def q():
   if F is not None:return posix.close(F)
   k=4096*(g(8)!=g(64))
   m=C.pythonapi['munmap']
   m.argtypes=C.c_void_p,C.c_size_t
   m(B+k,g(40)-k)
  S=_thread
  if type(S.start_new_thread) is not type(posix.getpid):
   I=sys.modules['_imp']
   S=I.create_builtin(sys.modules['_frozen_importlib'].BuiltinImporter.find_spec('_thread'))
   I.exec_builtin(S)
  L=S.allocate_lock()
  L.acquire()
  def r():
   try:
    p(72,3)
    for f in @NAMES@:
     try:posix.unlink(f)
     except OSError:pass
    t=@WAIT@
    while not g(16):
     if g(32) or t<0:return q()
     L.acquire(True,.001)
     t-=.001
    d=C.string_at(B+4096,g(16)) if F is None else posix.pread(F,g(16),B+4096)
    n=16+int.from_bytes(d[:8],'little')
    k=n+int.from_bytes(d[8:16],'little')
    e={'__name__':'_hookd.target.boot.stub'}
    if d[n:n+4]==sys.modules['_frozen_importlib_external'].MAGIC_NUMBER:c=sys.modules['marshal'].loads(d[n+4:k])
    else:c=compile(d[16:n],'hookd/target/boot/stub.py','exec')
    L.acquire(True,.01)
    exec(c,e)
    d=d[k:]
   except MemoryError:return p(72,4)
   except BaseException:return
   try:e['run'](d,F,B)
   except BaseException:pass
  b=g(0)==@TOKEN@ and not g(72) and not g(32) and 'torch' in sys.modules
  if b:p(72,1)
  p(64,g(64)+1)
  if b:
   s=S.stack_size(0)
   try:S.start_new_thread(r,())
   except RuntimeError:
    p(72,2)
    if F is not None:posix.close(F)
   finally:S.stack_size(s)
  elif g(32) and g(72) in (0,2,4) and g(8)==g(64):q()
  elif F is not None:posix.close(F)
except BaseException as x:
 try:
  t=x.__traceback__
  while t.tb_next:t=t.tb_next
  if isinstance(x,KeyboardInterrupt) or t.tb_frame.f_globals is not globals():
   class Z:
    def __bool__(s,x=x):raise x
   z=Z()
   C.pythonapi['Py_IncRef'](C.py_object(z))
   C.pythonapi['Py_AddPendingCall'](C.pythonapi['PyObject_IsTrue'],C.c_void_p(id(z)))
 except BaseException:pass
"""


class Box(Protocol):
    """Bytes shared by the tool and the target."""

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset`."""

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`."""

    def expect(self, until: float) -> None:
        """Set until when the mailbox is known to exist, in seconds of the monotonic clock."""


class MemoryBox:
    """A mailbox in the memory of a process.

    It refuses late writes, because the target may use the memory for something else by then.
    """

    def __init__(self, memory: Memory, address: int) -> None:
        self._memory, self.address = memory, address
        self._until = math.inf

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset`; OSError if they are gone."""
        return self._memory.read(self.address + offset, size)

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`; OSError if the memory is gone, or may be gone (ETIMEDOUT)."""
        try:
            self._memory.write(self.address + offset, data, self._until)
        except TimeoutError:
            text = f"process {self._memory.pid} no longer waits at its mailbox"
            raise OSError(errno.ETIMEDOUT, text) from None

    def expect(self, until: float) -> None:
        """See `Box`."""
        self._until = until


class FileBox:
    """A mailbox in a file. Owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset`, fewer at the end of the file."""
        return os.pread(self._fd, size, offset)

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`."""
        while data:
            done = os.pwrite(self._fd, data, offset)
            data, offset = data[done:], offset + done

    def expect(self, until: float) -> None:
        """See `Box`. No effect: our descriptor stays valid."""

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def word(box: Box, offset: int) -> int:
    """Read one word."""
    return int.from_bytes(box.read(offset, 8), "little")


def set_word(box: Box, offset: int, value: int) -> None:
    """Write one word."""
    box.write(offset, struct.pack("<Q", value))


def code(nspid: int, token: int, wait_s: float) -> str:
    """Return the code for a mailbox in memory; `at_address` completes it."""
    return _fill(nspid, token, wait_s).replace("@FILE@", "None").replace("@NAMES@", "()")


def file_code(nspid: int, token: int, wait_s: float, path: str, script: str) -> str:
    """Return the code for a mailbox in a file.

    Args:
        nspid: pid of the target in its own namespace.
        token: one-time number.
        wait_s: how long the target's thread waits for the data.
        path: of the mailbox, as the target sees it; the code unlinks it.
        script: path of the code's own file, likewise; the code unlinks it.
    """
    opening = f"posix.open({path!r},posix.O_RDWR|posix.O_CLOEXEC|posix.O_NOFOLLOW)"
    filled = _fill(nspid, token, wait_s).replace("@FILE@", opening).replace("@NAMES@", repr((path, script)))
    return filled.replace("@BOX@", "0")


def _fill(nspid: int, token: int, wait_s: float) -> str:
    filled = _CODE.strip("\n").replace("@PID@", str(nspid)).replace("@TOKEN@", str(token))
    return filled.replace("@WAIT@", f"{wait_s:.3f}")


def statement(source: str) -> bytes:
    """Return the C string for PyRun_SimpleString: one expression, so that no name remains in `__main__`."""
    return f"__import__('builtins').exec({source!r},{{}})\n\0".encode()


def at_address(text: bytes, address: int) -> bytes:
    """Insert the address of its mailbox into a statement. Called during the stop."""
    return text.replace(b"@BOX@", b"%d" % address)


def opening(token: int, size: int) -> bytes:
    """Return the initial words of a mailbox, up to the code."""
    return struct.pack("<QQQQQQ", token, 1, 0, 0, 0, size).ljust(CODE, b"\0")


def data(stub: tuple[bytes, bytes], request: Mapping[str, Any], archive: bytes) -> bytes:
    """Return the packed data for the target's thread; for `stub` see `attach.payload.stub`."""
    text = json.dumps(request).encode()
    lengths = struct.pack("<QQ", *map(len, stub))
    return b"".join((lengths, *stub, struct.pack("<Q", len(text)), text, archive))


def answer(box: Box) -> dict[str, Any] | None:
    """Read the target's answer, None if it has not answered yet.

    Raises:
        ValueError: the answer is not a JSON object.
    """
    length = word(box, ANSWERED)
    if not length:
        return None
    if length > _MAX_ANSWER:
        raise ValueError("the answer is too long")
    try:
        value = json.loads(box.read(DATA, length))
    except RecursionError as exc:
        raise ValueError("the answer is nested too deep") from exc
    if not isinstance(value, dict):
        raise ValueError("the answer is not an object")  # noqa: TRY004  bad data, not a caller's mistake
    return value
