"""The kernel of `device_kernel.py`, where it is wanted and works."""

from __future__ import annotations

from os import environ
from typing import TYPE_CHECKING, Any

from hookd.errors import worded
from hookd.target.plugins.faults import Failure, is_from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WANTED = "HOOKD_TRITON"
"""The variable of the environment that is 1 if the kernel is wanted."""


class Fused:
    """Runs the kernel until it fails for the first time; torch's operations can always take its place."""

    def __init__(self) -> None:
        self._launch: Any = None
        self._problem: BaseException | None = None
        if environ.get(WANTED) == "1":
            try:
                # Now, since hookd's sources are gone later. It imports Triton, which a target may lack.
                from hookd.target.tensors.device_kernel import launch  # noqa: PLC0415

                self._launch = launch
            except Failure as failure:
                if is_from_signal_handler(failure):
                    raise
                self._problem = failure

    def run(self, block: Tensor, *, has_sums: bool, log: Callable[[str], None]) -> tuple[Tensor, Tensor | None] | None:
        """Return what `device_kernel.launch` returns; None if torch's operations must do the work.

        Args:
            block: contiguous, of real numbers, and not empty.
            has_sums: whether sums are wanted.
            log: called once with the reason if the kernel does not work.
        """
        if self._launch is not None:
            try:
                found: tuple[Tensor, Tensor | None] | None = self._launch(block, has_sums=has_sums)
            except Failure as failure:
                if is_from_signal_handler(failure):
                    raise
                self._launch, self._problem = None, failure
            else:
                return found
        if self._problem is not None:
            log(
                f"the kernel of {WANTED}=1 does not work, and torch's operations take its place: {worded(self._problem)}"
            )
            self._problem = None
        return None
