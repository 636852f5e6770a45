"""How long each module takes, forward and backward, and where a step's time goes. Runs in the target.

Per module, of all calls of `forward` (wall time of the calling thread):

    hookd_timing_forward_seconds_total{module}         children included
    hookd_timing_forward_self_seconds_total{module}    without the modules called inside; all of them add up to the whole
    hookd_timing_forward_calls_total{module}
    hookd_timing_recompute_seconds_total{module}       the same for calls that activation checkpointing made again inside
    hookd_timing_recompute_self_seconds_total{module}  a backward; they are no part of the forward's figures, nor of the
    hookd_timing_recompute_calls_total{module}         modules' backward

Per module, estimated: one step in `every` is timed, and counted for all the steps that it stands for:

    hookd_timing_backward_seconds_total{module}        from its first node of the autograd graph to its last
    hookd_timing_backward_self_seconds_total{module}   without the backward of modules called inside
    hookd_timing_backward_calls_total{module}          divide by it for the mean
    hookd_timing_forward_device_seconds_total{module}  on a GPU: what the device took for the call, from events in its
    hookd_timing_backward_device_seconds_total{module} stream that are read when they are over; nothing ever waits.
                                                       Of the modules of one depth in a sampled step, and by turns

Of the training thread:

    hookd_timing_phase_seconds_total{phase}            data (waiting for a DataLoader of torch), forward (an evaluation's
                                                       too), backward (recompute included), optimizer, other: together
                                                       they are the wall time of the steps
    hookd_timing_steps_per_second                      over the last second, or the last step where that is longer
    hookd_timing_samples_total                         estimated: a step that is not sampled counts as the last that was
    hookd_timing_samples_per_second
    hookd_timing_flops_total                           operations of the layers in `hookd_timing.flops`, estimated
    hookd_timing_flops_per_second                      likewise; a multiplication and an addition are two, a recompute none
    hookd_timing_mfu_ratio                             that over what the device can do at its best

Options:

    every=10        steps between two sampled steps
    count_every=10  samples and operations are counted in a sampled step in so many steps, for which a Python function is
                    called at every layer; 1: in every sampled step
    batch_dim=0     which dimension of the input counts the samples; -1: none does
    peak_flops=     operations per second of this rank's device, for mfu_ratio; by default the dense bfloat16 figure of
                    the GPU in `hookd_timing.peak`, and no mfu_ratio where it is not there (a CPU, a part of a GPU)

The backward of a module is the wall time from the beginning of its first node to the end of its last one, without
hookd's own hooks and without recomputes. What the engine does in between is in it: moving gradients from node to node,
accumulating them into `.grad`, and, where branches run in turn, the nodes of others. Where hookd has a hook of its own
behind a module's last node (the first module of a model, what calls in Python are told of), what that one gives is accumulated
after it, in the self time of the module around.

Samples and operations are those of calls that go backward: not those of an evaluation or a frozen teacher. Samples are
counted at the root with the most trained parameters: the size of its first argument, or of the first tensor in that if
it is a dict. Where that is no tensor (a list of images, a graph) there are no samples. A tensor that begins with another
dimension (time, nodes) needs `batch_dim`. Each call counts: a critic that sees a real and a false batch has two.

Limits. On a GPU `seconds` without `device` are those of launching. Those of the device are times of its stream, from the
call's first kernel to its last, with the gaps in between. They are taken where no other plugin looks, so with one that
looks at every step (`nan:every=1`) there are none. What always happens in a step that is sampled, or
never does, is over- or underestimated. Of a call that raises only the modules inside that had returned are counted, so
own times then add up to more than the root's. `torch.autograd.grad` and data that no DataLoader gives are `other`.
Attention written as a function, and what is compiled, has no FLOPs here; a second backward through the same graph adds
none. Of a model with tensor parallelism a rank counts the whole layer, of one that is spread over several GPUs
`peak_flops` is that of the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd import Context, Module, Plugin, hookimpl
from hookd_timing.device import DIRECTIONS, Device, is_in_use, may_be_in_use
from hookd_timing.flops import has_formula
from hookd_timing.throughput import Throughput

if TYPE_CHECKING:
    from hookd import Counter


class Timing(Plugin):
    """Times modules and the phases of a step.

    Forward calls are all timed, and backward passes of sampled steps: hookd adds them up. A look at shapes or events in a stream
    costs microseconds, so it is sampled as well.
    """

    name = "timing"
    sampled = ("forward_pre", "forward", "backward_pre", "backward")
    every = 10
    apart = True

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.backwards: dict[int, tuple[Any, int, int, int]] = context.per_module()
        _add_up(context, _families(context, "forward", "of the module's forward calls"))
        again = _families(context, "recompute", "of calls made again by activation checkpointing")
        _add_up(context, again, recompute=True)
        self.of_backward = _families(context, "backward", "of the module's backward, estimated from sampled steps")
        _add_up(context, self.of_backward, backward=True)
        context.add_up_phases(context.counter("phase_seconds", "Wall time of the training thread by phase.", ["phase"]))
        self.throughput = Throughput(context)
        self.device = Device(context)
        self.has_turns = is_in_use()
        self._listen()

    @hookimpl
    def select(self, module: Module) -> set[str]:
        """Say which events of a module are worth their price; where torch knows no device, shapes alone are looked at."""
        if may_be_in_use():
            wanted = {"forward", "backward", "forward_pre", "backward_pre"}
            return wanted if module.depth else wanted | {"root_forward_pre", "root_forward"}
        has_operations = module.depth == 0 or has_formula(module.torch())
        return {"forward", "forward_pre", "backward"} if has_operations else {"forward", "backward_totals"}

    @hookimpl(trylast=True)
    def forward_pre(self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the shapes of a sampled step, or begin to time the device."""
        self.device.note_sampled()
        if self.device.is_forward:
            self.device.begin_forward(module, inputs, kwargs)
            return
        if module.depth == 0 and module not in self.context.stack()[:-1]:
            self.throughput.see_root(module, inputs, kwargs)
        self.throughput.see(module, inputs, kwargs)

    @hookimpl(tryfirst=True)
    def forward(self, module: Module) -> None:
        """End what was begun on the device; the calls of all steps are added up without this."""
        self.device.end_forward(module)

    @hookimpl(trylast=True)
    def root_forward_pre(self, module: Module) -> None:
        """Begin to time a whole model on the device, in a step in which nothing else is."""
        self.device.begin_root(module)

    @hookimpl(tryfirst=True)
    def root_forward(self, module: Module) -> None:
        """End that."""
        self.device.end_root(module)

    @hookimpl(trylast=True)
    def backward_pre(self, module: Module) -> None:
        """Begin to time the device."""
        self.device.begin_backward(module)

    @hookimpl(tryfirst=True)
    def backward(self, module: Module, elapsed_ns: int, self_ns: int) -> None:
        """Count the operations of one, and on a device its time, for all the steps that a sampled one stands for."""
        self.throughput.see_backward(module)
        if (
            self.has_turns
        ):  # in which hookd adds nothing up: a sampled step stands for those of the other direction as well
            self.device.end_backward(module)
            _add(
                self.backwards, self.of_backward, module, elapsed_ns, self_ns, float(DIRECTIONS * self.context.interval)
            )

    @hookimpl
    def step_done(self) -> None:
        """End a step."""
        self.throughput.step_done()
        if is_in_use():  # a model may come to the device at any time
            self.has_turns = True
            self.device.step_done()
        self._listen()

    def _listen(self) -> None:
        """Have called what is timed next on a device; where there is none, what looks at shapes, when that is due."""
        forward, listen = self.device.is_forward, self.context.listen
        looks = self.has_turns or self.throughput.is_due()
        listen("forward_pre", wanted=looks)
        listen("forward", wanted=self.has_turns)
        listen("backward_pre", wanted=self.has_turns and not forward)
        listen("backward", wanted=looks and not forward)
        listen("backward_totals", wanted=not self.has_turns)
        for hook in ("root_forward_pre", "root_forward"):
            listen(hook, wanted=self.device.is_root)


def _families(context: Context, direction: str, what: str) -> tuple[Counter, Counter, Counter]:
    of_module = ["module"]
    return (
        context.counter(f"{direction}_seconds", f"Wall time {what}, children included.", of_module),
        context.counter(f"{direction}_self_seconds", f"Wall time {what}, without modules called inside.", of_module),
        context.counter(f"{direction}_calls", f"Number {what}.", of_module),
    )


def _add_up(
    context: Context, families: tuple[Counter, Counter, Counter], *, recompute: bool = False, backward: bool = False
) -> None:
    seconds, self_seconds, calls = families
    context.add_up(seconds=seconds, self_seconds=self_seconds, calls=calls, recompute=recompute, backward=backward)


def _cells(families: tuple[Counter, Counter, Counter], module: Module) -> tuple[Any, int, int, int]:
    seconds, own, calls = (family.labels(module.name) for family in families)
    return seconds.cells, seconds.at, own.at, calls.at


def _add(  # noqa: PLR0917 - one event
    known: dict[int, tuple[Any, int, int, int]], families: tuple[Counter, Counter, Counter], module: Module,
    elapsed_ns: int, self_ns: int, weight: float,
) -> None:  # fmt: skip
    if module.id not in known:
        known[module.id] = _cells(families, module)
    cells, seconds, own, calls = known[module.id]
    elapsed_s, self_s = elapsed_ns * 1e-9 * weight, self_ns * 1e-9 * weight
    cells[seconds] += elapsed_s
    cells[own] += self_s
    cells[calls] += weight
