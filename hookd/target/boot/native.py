"""Shared objects that travel in the payload, loaded from memory. Runs in the target.

They depend on no library, and are loaded through a memory file: no file system is written, and one mounted noexec does not
matter. torch itself imports ctypes, so it is there.
"""

from __future__ import annotations

import ctypes
import errno
import posix
from typing import Any

from hookd.wire.descriptors import Descriptor, fill, moved_up

_MFD_EXEC = 0x10  # Linux 6.3: without it, a machine with vm.memfd_noexec = 1 makes files that cannot be mapped as code


def image_of(name: str) -> bytes:
    """Return the bytes of a shared object for this kind of machine, from the payload or from where hookd is installed.

    Raises:
        OSError: it was not built for that.
    """
    path = f"{__file__.rpartition('target/')[0]}native/{name}-{posix.uname().machine}.so"
    image = bytes(__spec__.loader.get_data(path))  # type: ignore[union-attr]  # all loaders that we meet have it
    if not image:
        raise FileNotFoundError(path)
    return image


def load(name: str, image: bytes, *, keeps_lock: bool = False) -> Any:
    """Load a shared object; return the ctypes library.

    Args:
        name: of the memory file, as /proc/PID/maps shows it.
        image: the shared object's bytes.
        keeps_lock: whether its functions are called with the interpreter's lock held, and may use Python objects.

    Raises:
        OSError: the system does not allow it, or it is made for another machine.
    """
    with Descriptor(moved_up(_memory_file(name))) as file:
        fill(file.number, image)
        return (ctypes.PyDLL if keeps_lock else ctypes.CDLL)(_path_of(file.number))


def function(library: Any, name: str, *arguments: Any) -> Any:
    """Return a function of a library that returns an int.

    Raises:
        AttributeError: there is none of this name.
    """
    found = library[name]  # by index, for an attribute access would keep it in the library's dict: a cycle
    found.argtypes, found.restype = arguments, ctypes.c_int
    return found


def caller(library: Any, name: str) -> Any:
    """Return a function of a library that takes a callable, a tuple and a dict, and returns what the callable does.

    Raises:
        AttributeError: there is none of this name.
    """
    found = library[name]
    found.argtypes, found.restype = (ctypes.py_object,) * 3, ctypes.py_object
    return found


def objects(library: Any, name: str) -> tuple[Any, ...]:
    """Return the objects that a function of a library makes.

    Raises:
        AttributeError: there is none of this name.
    """
    found = library[name]
    found.argtypes, found.restype = (), ctypes.py_object
    made: tuple[Any, ...] = found()
    return made


def unload(library: Any) -> None:
    """Return a library's memory (musl's dlclose keeps it mapped). No thread may be inside it, or call it later."""
    import _ctypes  # noqa: PLC0415  # where there is ctypes there is this

    _ctypes.dlclose(library._handle)


def _path_of(descriptor: int) -> str:
    """Spell the path of a descriptor as no other file's was: the loader takes a path that it has seen for the same file.

    Source: glibc elf/dl-load.c `_dl_map_object`, 2.36; it compares names before it opens anything.
    """
    bits = f"{posix.fstat(descriptor).st_ino:b}"
    return "/proc/self/fd/" + "".join("./" if bit == "1" else "/" for bit in bits) + str(descriptor)


def _memory_file(name: str) -> int:
    flags: int = posix.MFD_CLOEXEC
    try:
        return posix.memfd_create(name, flags | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return posix.memfd_create(name, flags)  # Linux before 6.3 does not know the flag
