"""Fingerprints that a daemon keeps, as its API and the commands show them."""

from __future__ import annotations

from typing import TypedDict, final


@final
class KeptRow(TypedDict):
    """A fingerprint that the daemon keeps."""

    path: str
    """Of its file, which `hookd diff` reads."""
    run: str
    rank: str
    pid: int
    began: float
    """Unix time at which the recording began."""
    updated: float | None
    """Unix time of the last step; null if there is none yet."""
    is_live: bool
    """Whether it is still being recorded."""
    steps: int
    """Number of steps recorded."""
    lost: int
    """Number of steps that came faster than they could be recorded."""
    step: int | None
    """The last step; null if there is none yet."""
    digest: str
    """Digest of the last step: equal for steps in which everything is equal."""
