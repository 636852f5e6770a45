"""The kernel of `device_kernel.py`, where it is wanted and works."""

from __future__ import annotations

from os import environ
from typing import TYPE_CHECKING, Any

from hookd.errors import worded
from hookd.target.plugins.faults import Failure, is_from_signal_handler

if TYPE_CHECKING:
    from torch import Tensor

    from hookd.api.context import Context

WANTED = "HOOKD_TRITON"
"""The variable of the environment that is 1 if the kernel is wanted."""


class Fused:
    """Runs the kernel until it fails for the first time; torch's operations can always take its place."""

    def __init__(self) -> None:
        self._launch: Any = None
        self._problem = ""
        if environ.get(WANTED) == "1":
            try:
                # Now, since hookd's sources are gone later. It imports Triton, which a target may lack.
                from hookd.target.tensors.device_kernel import launch  # noqa: PLC0415

                self._launch = launch
            except Failure as failure:
                if is_from_signal_handler(failure):
                    raise
                self._problem = worded(failure)

    def run(self, context: Context, block: Tensor, *, has_sums: bool) -> tuple[Tensor, Tensor | None] | None:
        """Return what `device_kernel.launch` returns; None if torch's operations must do the work.

        Args:
            context: of a plugin, in whose name it is logged once if the kernel does not work.
            block: contiguous, of real numbers, and not empty.
            has_sums: whether sums are wanted.
        """
        if self._launch is not None:
            try:
                found: tuple[Tensor, Tensor | None] | None = self._launch(block, has_sums=has_sums)
            except Failure as failure:
                if is_from_signal_handler(failure):
                    raise
                self._launch, self._problem = None, worded(failure)
            else:
                return found
        if self._problem:
            context.log(f"the kernel of {WANTED}=1 does not work; torch's operations take its place: {self._problem}")
            self._problem = ""
        return None
