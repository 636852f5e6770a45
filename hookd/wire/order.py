"""Order of loads and stores in memory that two processes share.

An x86-64 processor makes the stores of a thread visible in their order, and loads in order. A 64-bit ARM processor keeps neither
order, except for what it is told to keep. Python has no instruction for that, but its locks have: to release a lock stores it
with release semantics, and to acquire it is an atomic operation with acquire semantics (glibc's `sem_post` and `sem_trywait` up to CPython 3.13,
`PyMutex` since 3.14). On ARM a release is ordered before a later acquire of the same thread, so a release that is followed by an
acquire orders all that is before them before all that is after them. Source: Arm Architecture Reference Manual, B2.3,
"Barrier-ordered-before".

A barrier of the writer is of use only with one of the reader:

- Who reads by `pread` or `process_vm_readv` needs no barrier between two calls: each takes and releases a reference to the memory
  page, which are fully ordered atomic operations in Linux (`folio_try_get`, `folio_put`; Documentation/atomic_t.txt). Inside one
  call nothing is ordered: hookd's readers read what depends on a word by another call than the word.
- Who reads a map calls `barrier` between the word and what depends on it.

An aligned number of 8 bytes is never torn by a load or a store of it. It may be by the kernel's copy, which may copy bytes: see
`PageReader._cells`.
"""

from __future__ import annotations

import posix

from hookd.wire.originals import Lock

IS_STRONG = posix.uname().machine == "x86_64"
"""Whether this processor keeps the order of stores and of loads by itself."""


def barrier() -> None:
    """Order all loads and stores of this thread before its later ones, for other processes to see.

    A store that is followed by a load is the exception: on x86-64 the load may come first.
    """
    if not IS_STRONG:
        through_lock()


def through_lock() -> None:
    """Order them on every processor, by a lock that is new, so that no other thread can hold it."""
    lock = Lock()
    for _ in range(2):
        lock.acquire(blocking=False)
        lock.release()
