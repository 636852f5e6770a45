"""Pids that are reused while hookd looks."""

from __future__ import annotations

from typing import Any

from hookd.tool.linux import proc


def reuse_pids(monkeypatch: Any, after: int) -> None:
    """Make every pid belong to a younger process once hookd has asked `after` times when a process was started."""
    real, asked = proc.start_ticks, []

    def start_ticks(pid: int) -> int:
        asked.append(pid)
        return real(pid) + (len(asked) > after)

    monkeypatch.setattr(proc, "start_ticks", start_ticks)
