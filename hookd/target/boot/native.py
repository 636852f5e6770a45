"""Loading of the payload's shared objects from memory.

They do not depend on any library, and are loaded through a memory file: nothing is written to a file system, and a file system
mounted noexec does not matter. ctypes is available, because torch itself imports it.
"""

from __future__ import annotations

import ctypes
import errno
import posix
from typing import Any

from hookd.wire.descriptors import Descriptor, fill, moved_up

_MFD_EXEC = 0x10  # Linux 6.3: without it, a machine with vm.memfd_noexec = 1 makes files that cannot be mapped as code


def image_of(name: str) -> bytes:
    """Return the bytes of a shared object for this architecture.

    They come from the payload, or from hookd's installation.

    Raises:
        OSError: it was not built for this architecture.
    """
    path = f"{__file__.rpartition('target/')[0]}native/{name}-{posix.uname().machine}.so"
    image = bytes(__spec__.loader.get_data(path))  # type: ignore[union-attr]  # every loader used here has it
    if not image:
        raise FileNotFoundError(path)
    return image


def load(name: str, image: bytes, *, keeps_lock: bool = False) -> Any:
    """Load a shared object, and return the ctypes library.

    Args:
        name: name of the memory file, as shown in /proc/PID/maps.
        image: the shared object's bytes.
        keeps_lock: whether its functions are called with the GIL held, and may use Python objects.

    Raises:
        OSError: the system does not allow it, or the object is for another architecture.
    """
    with Descriptor(moved_up(_memory_file(name))) as file:
        fill(file.number, image)
        return (ctypes.PyDLL if keeps_lock else ctypes.CDLL)(_path_of(file.number))


def function(library: Any, name: str, *arguments: Any) -> Any:
    """Return a function of a library that returns an int.

    Raises:
        AttributeError: the library has no such function.
    """
    symbol = library[name]  # by index, because an attribute access would keep it in the library's dict: a cycle
    symbol.argtypes, symbol.restype = arguments, ctypes.c_int
    return symbol


def caller(library: Any, name: str) -> Any:
    """Return a function of a library that calls a callable.

    It takes the callable, a tuple and a dict, and returns the callable's result.

    Raises:
        AttributeError: the library has no such function.
    """
    symbol = library[name]
    symbol.argtypes, symbol.restype = (ctypes.py_object,) * 3, ctypes.py_object
    return symbol


def objects(library: Any, name: str) -> tuple[Any, ...]:
    """Return the objects that a function of a library creates.

    Raises:
        AttributeError: the library has no such function.
    """
    symbol = library[name]
    symbol.argtypes, symbol.restype = (), ctypes.py_object
    made: tuple[Any, ...] = symbol()
    return made


def unload(library: Any) -> None:
    """Unload a library (musl's dlclose keeps it mapped). No thread may be inside it, or call it later."""
    import _ctypes  # noqa: PLC0415  # always there beside ctypes

    _ctypes.dlclose(library._handle)


def _path_of(descriptor: int) -> str:
    """Return a spelling of a descriptor's path that is new to the loader.

    The dynamic loader takes two files with the same path for one. Source: glibc elf/dl-load.c `_dl_map_object`, 2.36; it
    compares names before it opens anything.
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
