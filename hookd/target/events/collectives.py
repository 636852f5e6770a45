"""Finds where the training waits for other ranks: at the end of a backward, and in which other phases.

DistributedDataParallel and FSDP exchange gradients while the backward computes others. They wait for the last ones at its end, in a
callback that they queue at autograd's engine (torch/csrc/distributed/c10d/reducer.cpp `Reducer::mark_variable_ready`,
torch/distributed/fsdp/_runtime_utils.py `_register_post_backward_final_callback`; 1.11 to 2.13). The engine calls such functions in
the order in which they were queued, after all gradients are computed. So a function that is queued before the first gradient is
computed marks the beginning of that wait.

On a device the host only queues the exchange: it waits where it next needs a result, which may be in another phase.

A rank may wait in any phase in which it issues collectives: FSDP gathers parameters in the forward, DistributedDataParallel sends
buffers there, a script adds up its losses outside. The time of such a phase says nothing about which rank is slow.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Variable

from hookd.api.metrics import Gauge
from hookd.api.passive import of_tensor
from hookd.target.entry.dynamo import is_autograd_compiled
from hookd.target.plugins.faults import Failure
from hookd.target.tensors.torch_state import unseen
from hookd.wire.page import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hookd.target.boot.arming import Life
    from hookd.target.boot.identity import Process
    from hookd.target.entry.threads import ThreadState
    from hookd.wire.page import PageWriter

COLLECTIVES, OPTIMIZER = (PHASES.index(phase) for phase in ("collectives", "optimizer"))
OF_A_STEP = ("data", "forward", "backward", "optimizer", "other")
STEPS = 8
"""Number of metered steps over which a phase's share of steps with collectives follows a change."""
_engine: Any = Variable._execution_engine  # noqa: SLF001  there is no public way to queue a callback


class Collectives:
    """Switches a thread to the phase `collectives` when all gradients of its backward are computed.

    Args:
        set_phase: switches a thread to another phase.
        callback: makes the functions that the training calls.
        own_failure: handles an error of hookd itself.
    """

    def __init__(
        self,
        *,
        process: Process,
        life: Life,
        set_phase: Callable[[ThreadState, int], None],
        callback: Callable[..., Callable[..., Any]],
        own_failure: Callable[[str, BaseException], None],
    ) -> None:
        self._process, self._life, self._set_phase = process, life, set_phase
        self._callback, self._own_failure = callback, own_failure

    def backward_begins(self, thread: ThreadState, tensors: Sequence[Tensor]) -> Any:
        """Prepare for the backward from these tensors.

        Returns:
            The handle of a hook, to be removed at the end; None in a job of one rank.
        """
        if self._process.world_size < 2 or is_autograd_compiled():
            return None
        try:
            with unseen():
                root = next((one for one in tensors if of_tensor(one, "grad_fn") is not None), None)
                return None if root is None else self._hook(thread, root)
        except Failure as failure:
            self._own_failure("the wait for other ranks", failure)
            return None

    def _hook(self, thread: ThreadState, root: Tensor) -> Any:
        """Hook the beginning of a backward; the hook queues the function that switches the phase."""

        def computed() -> None:
            if self._life.is_live:
                self._set_phase(thread, COLLECTIVES)

        queued = self._callback(self._guarded(computed))

        def begin(_grads: Any) -> None:
            _engine.queue_callback(queued)

        node, hooks = of_tensor(root, "grad_fn"), of_tensor(root, "_backward_hooks")
        act = self._callback(self._guarded(begin))
        if not hooks and hasattr(node, "register_prehook"):
            return node.register_prehook(act)
        # A tensor's hooks run before its node's, and FSDP queues its callback in one.
        handle: Any = Tensor.register_hook(root, act)  # type: ignore[no-untyped-call]
        _call_first(of_tensor(root, "_backward_hooks"), handle.id)
        return handle

    def _guarded(self, act: Callable[..., None]) -> Callable[..., None]:
        def guarded(*args: Any) -> None:
            try:
                act(*args)
            except Failure as failure:
                self._own_failure("the wait for other ranks", failure)

        return guarded


def _call_first(hooks: dict[int, Any], first: int) -> None:
    """Make the hook `first` of a tensor the first one to be called.

    The engine calls them in the order in which they came into the dict, whatever the OrderedDict says.
    """
    others = [key for key in hooks if key != first]
    # In one call of C, so that no signal handler sees a hook missing.
    deque(map(hooks.__setitem__, others, map(hooks.pop, others)), maxlen=0)


class PhaseCollectives:
    """Publishes for each phase in what share of the steps it issues collectives. In metered steps only.

    Args:
        issued: returns the number of collectives that this rank has issued, in all groups.
    """

    def __init__(self, page: PageWriter, issued: Callable[[], int]) -> None:
        self._issued, self._is_new = issued, True
        self._gauge = Gauge(
            page, "hookd_collectives_phase_ratio",
            "Share of recent steps in which the training issued collectives in this phase, so that ranks may wait there.",
            ("phase",),
        )  # fmt: skip
        self._before: int | None = None  # None: not known at the beginning of the phase that is over
        self._phases: set[int] = set()  # phases of the step in progress that have issued any
        self._shares = dict.fromkeys(map(PHASES.index, OF_A_STEP), 0.0)

    def phase_over(self, phase: int, *, is_metered: bool) -> None:
        """Take the end of a phase. The end of an optimizer ends the step as well."""
        if not is_metered and phase != OPTIMIZER:
            self._before = None
            return
        issued = self._issued()
        if self._before is not None and is_metered and issued > self._before:
            self._phases.add(phase)
        self._before = issued
        if phase == OPTIMIZER and is_metered:
            self._publish()

    def _publish(self) -> None:
        if self._is_new:
            self._is_new = False
            self._shares = {phase: float(phase in self._phases) for phase in self._shares}
        for phase, share in self._shares.items():
            self._shares[phase] = share + (float(phase in self._phases) - share) / STEPS
            self._gauge.labels(PHASES[phase]).set(self._shares[phase])
        self._phases.clear()
