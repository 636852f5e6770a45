"""Attach to a running process, detach from it, talk to the agent in it. Tool side; never imports torch."""

from __future__ import annotations

from hookd.attach.control import Control, detach
from hookd.attach.live import attach
from hookd.attach.request import AttachRequest, AttachResult

__all__ = ["AttachRequest", "AttachResult", "Control", "attach", "detach"]
