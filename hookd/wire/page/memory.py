"""Allocate the memory of a page without harm to the target, which may have little left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import posix

from hookd.errors import PageError
from hookd.wire.descriptors import Descriptor, fcntl, moved_up, read
from hookd.wire.originals import MOST_ADDRESSES, MOST_FILE_BYTES, limit
from hookd.wire.page.layout import F_ADD_SEALS, MIN_SIZE, NAME, SIZE

_CLOEXEC, _ALLOW_SEALING, _NOEXEC_SEAL = 1, 2, 8  # linux/memfd.h
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # asm-generic/mman.h
_STREAMS = 3
_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4  # linux/fcntl.h
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "ppc64le": 360, "s390x": 350}  # asm/unistd.h
_SMALLER_MAY_DO = (errno.ENOMEM, errno.EAGAIN, errno.EFBIG, errno.ENOSPC)


def allocate(size: int = SIZE) -> tuple[Descriptor, mmap.mmap]:
    """Create and map a memfd of at most `size` and at least MIN_SIZE bytes, all zero and without physical memory yet.

    Raises:
        PageError: reason "no-memfd" or "no-memory".
        ValueError: size is not a power of two from MIN_SIZE to SIZE.
    """
    if not MIN_SIZE <= size <= SIZE or size & (size - 1):
        raise ValueError(f"{size} is not a power of two from {MIN_SIZE} to {SIZE}")
    size = _allowed(size)
    # The program may have closed a standard stream; if the memfd got its number, prints would be written into the page.
    file = Descriptor(moved_up(_memfd()))
    if file.number < _STREAMS:
        file.close()
        raise _no_memfd(OSError(errno.EMFILE, posix.strerror(errno.EMFILE)))
    try:
        return file, _map(file.number, size)
    except BaseException:
        file.close()
        raise


def _allowed(size: int) -> int:
    """Halve the size until the limits allow it; the training keeps three quarters of the address space that is left.

    RLIMIT_FSIZE is checked first because ftruncate raises SIGXFSZ, which kills the process, when the limit is exceeded.
    """
    file_bytes, address_bytes = limit(MOST_FILE_BYTES), limit(MOST_ADDRESSES)
    allowed = math.inf if file_bytes is None else file_bytes
    if address_bytes is not None:
        allowed = min(allowed, (address_bytes - _mapped_bytes()) // 4)
    while size > allowed and size > MIN_SIZE:
        size //= 2
    if size > allowed:
        raise _no_memory(f"its limits leave {max(allowed, 0) / 2**20:.1f} MiB")
    return size


def _mapped_bytes() -> int:
    try:
        return int(read("/proc/self/statm").split()[0]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):  # without /proc, compare with the whole limit
        return 0


def _memfd() -> int:
    """Create the memfd, sealed against execution if the kernel can do that (6.3 and later)."""
    try:
        try:
            return _memfd_create(_CLOEXEC | _ALLOW_SEALING | _NOEXEC_SEAL)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return _memfd_create(_CLOEXEC | _ALLOW_SEALING)
    except (OSError, LookupError) as exc:
        raise _no_memfd(exc) from exc


def _memfd_create(flags: int) -> int:
    if hasattr(posix, "memfd_create"):
        return posix.memfd_create(NAME, flags)
    # Python was built on an old libc (conda, standalone builds).
    fd = int(ctypes.CDLL(None, use_errno=True).syscall(_MEMFD_CREATE[posix.uname().machine], NAME.encode(), flags))
    if fd < 0:
        raise OSError(ctypes.get_errno(), posix.strerror(ctypes.get_errno()))
    return fd


def _map(fd: int, size: int) -> mmap.mmap:
    """Resize the memfd and map it, halving the size while the kernel refuses it."""
    while True:
        try:
            posix.ftruncate(fd, size)
            # Map anonymous memory first: an mmap of a file keeps its own descriptor, and would close it by number.
            memory = mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            _cover(memory, mmap.MAP_SHARED, fd)
        except OSError as exc:  # noqa: PERF203  up to five times
            if size // 2 < MIN_SIZE or exc.errno not in _SMALLER_MAY_DO:
                raise _no_memory(str(exc)) from exc
            size //= 2
        else:
            break
    with contextlib.suppress(OSError):  # if another process could shrink it, our next store would raise SIGBUS
        fcntl(fd, F_ADD_SEALS, _SEAL | _SEAL_SHRINK | _SEAL_GROW)
    return memory


def _no_memfd(why: Exception) -> PageError:
    return PageError(
        f"process {posix.getpid()} cannot create a memfd: {why}",
        reason="no-memfd",
        hint="raise its RLIMIT_NOFILE (prlimit --pid PID --nofile=N), or allow memfd_create in its seccomp profile",
    )


def _no_memory(why: str) -> PageError:
    return PageError(
        f"process {posix.getpid()} has no room for a page of {MIN_SIZE >> 20} MiB: {why}",
        reason="no-memory",
        hint="raise its RLIMIT_AS or RLIMIT_FSIZE: prlimit --pid PID --as=unlimited --fsize=unlimited",
    )


def unshare(memory: mmap.mmap) -> None:
    """Replace a map by private, zeroed memory at the same addresses."""
    with contextlib.suppress(OSError):
        _cover(memory, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def _cover(memory: mmap.mmap, flags: int, fd: int) -> None:
    """Replace a map by another one at the same addresses.

    Raises:
        OSError: as mmap(2).
    """
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    call = ctypes.CDLL(None, use_errno=True)["mmap"]
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    if call(place, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd, 0) != place:
        raise OSError(ctypes.get_errno(), posix.strerror(ctypes.get_errno()))
