"""The fingerprint of a rank: its last digest, and with which other ranks and runs it is equal."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hookd.tool.daemon.fingerprints.kept import agreement, is_replica
from hookd.tool.daemon.web.pages import parts as shared
from hookd.tool.daemon.web.pages.html import Markup, join, table, tag
from hookd.tool.reports.wording import count, moment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hookd.tool.daemon.fingerprints.kept import Agreement, Kept

MOST = 12
"""Maximum number of rows, those of the newest fingerprints."""


def parts(own: Kept, others: Sequence[Kept]) -> Iterator[Markup | None]:
    """Yield the parts of the section.

    Args:
        own: the fingerprint of the rank that is shown.
        others: all that the daemon keeps, the newest first.
    """
    last = own.last()
    if last is None:
        yield tag("p", "No step has been recorded yet.", class_="soft")
        return
    step, digests = last
    lost = f"; {count(own.lost, 'step')} came too fast to be recorded" if own.lost else ""
    yield shared.facts((
        ("last step", join(f"{step:,}, digest ", tag("code", digests.whole))),
        ("its gradients and weights", tag("code", digests.shared) if digests.shared else None),
        ("recorded", f"{count(own.steps, 'step')} since {moment(own.began)}{lost}"),
        ("file", tag("code", own.path)),
    ))  # fmt: skip
    replicas = sorted(
        (other for other in others if is_replica(own, other)), key=lambda other: (len(other.rank), other.rank)
    )
    runs = [other for other in others if other.run != own.run]
    rows = [row for other in (*replicas, *runs) if (row := _row(own, other)) is not None][:MOST]
    if not rows:
        yield tag("p", "No other rank or run that is recorded here has computed the same.", class_="soft")
        return
    head = ("run", ">rank", "began", "same as this rank", "where they part")
    width = len(head) if any(row[-1] for row in rows) else len(head) - 1
    yield table("Ranks and runs with the same steps", head[:width], [row[:width] for row in rows])


def _row(own: Kept, other: Kept) -> list[object] | None:
    """Return the row of another fingerprint; None if no step is equal."""
    how, is_rank = agreement(own, other), is_replica(own, other)
    if how.equal is None:
        return None
    what, phases = ("gradients and weights of ", " --what gradients,update") if is_rank else ("", "")
    said = tag("span", _said(how, what), class_="good" if how.parted is None else "bad")
    command = f"hookd diff {shlex.quote(str(own.path))} {shlex.quote(str(other.path))}{phases}"
    return [other.run, other.rank, moment(other.began), said, tag("code", command, class_="copy") if how.parted else ""]


def _said(how: Agreement, what: str) -> str:
    if how.parted is None:
        return f"{what}all {how.common:,} steps" if how.common > 1 else f"{what}the only step"
    return f"{what}the steps up to {how.equal:,}; step {how.parted:,} differs"
