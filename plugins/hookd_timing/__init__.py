"""Measure the time of each module, forward and backward, and of the phases of a step.

Per module, for all calls of the training (wall time of the calling thread):

    hookd_timing_forward_seconds_total{module}         children included
    hookd_timing_forward_self_seconds_total{module}    without nested modules; the self times of all modules add up
                                                       to the whole
    hookd_timing_forward_calls_total{module}
    hookd_timing_recompute_seconds_total{module}       the same for calls that activation checkpointing repeats inside
    hookd_timing_recompute_self_seconds_total{module}  a backward; these are not included in the forward metrics, nor in
    hookd_timing_recompute_calls_total{module}         the backward of the modules
    hookd_timing_inference_seconds_total{module}       the same for calls that no backward follows: a validation, a
    hookd_timing_inference_self_seconds_total{module}  rollout, a teacher, a process that only serves; these are not
    hookd_timing_inference_calls_total{module}         included in the forward metrics either

Per module, estimated: one step in `every` is timed, and counts for all the steps that it represents:

    hookd_timing_backward_seconds_total{module}        from its first node of the autograd graph to its last
    hookd_timing_backward_self_seconds_total{module}   without the backward of nested modules
    hookd_timing_backward_calls_total{module}          calls; the divisor for mean times
    hookd_timing_forward_device_seconds_total{module}  on a GPU: time of the device for the call, from events in its
    hookd_timing_backward_device_seconds_total{module} stream. They are read once they are over; nothing ever waits. The
                                                       depths of the model take turns: one depth per sampled step

For the training thread:

    hookd_timing_phase_seconds_total{phase}            data (waiting for a torch DataLoader), forward, backward
                                                       (recompute included), collectives (the end of a backward, which
                                                       waits for other ranks), optimizer, other: together they are the
                                                       wall time of the steps; and inference, with the time between
                                                       its calls
    hookd_timing_samples_total                         trained on, in all steps
    hookd_timing_tokens_total                          likewise, padding included, if the first input is [batch, length] of
                                                       integers
    hookd_timing_flops_total                           operations of the layers in `hookd_timing.flops`, estimated; a
                                                       multiplication and an addition are two operations, and
                                                       recomputed ones do not count
    hookd_timing_peak_flops_per_second                 of the device: the MFU is the rate of hookd_timing_flops_total
                                                       divided by it
    hookd_timing_device_info{device,gpu_uuid,gpu}      1 for each GPU that parameters are on, by the name that NVML and
                                                       dcgm-exporter give it

Options:

    every=10        one step in N is sampled
    count_every=10  operations are counted in one sampled step per N steps, because a Python function is then called at
                    every layer; 1: in every sampled step
    batch_dim=0     the dimension of the input whose size is the number of samples; -1: no samples
    peak_flops=     operations per second of this rank's device; the default is the dense bfloat16 figure of the GPU in
                    `hookd_timing.peak`. A device that is not listed (a CPU, a part of a GPU) has none

Inference are outermost calls without autograd (`torch.no_grad`, `torch.inference_mode`), or of a model in `eval()` that no
backward follows, with all calls inside of them.

The backward of a module is the wall time from the beginning of its first node to the end of its last one, without
hookd's own hooks and without recomputes. It includes the engine's work in between: moving gradients from node to node,
accumulating them into `.grad`, and, if branches run in turn, the nodes of other modules. If hookd has its own hook
behind a module's last node (for the first module of a model, and for modules whose backward calls Python), the
gradients of that node are accumulated after the hook, in the self time of the enclosing module.

Samples and operations are not counted for inference. Samples are counted at the root with the most trained parameters: the size of its first argument, or of the first tensor
in it if it is a dict. If that is not a tensor (a list of images, a graph), no samples are counted. A tensor whose first
dimension is another one (time, nodes) needs `batch_dim`. Each call counts: a critic that sees a real and a fake batch
counts both.

Limits. On a GPU, metrics without `device` measure the time to launch. Device times are times of the stream, from the
call's first kernel to its last, with the gaps in between. They are only measured in steps that no other plugin samples:
with a plugin that observes every step (`nan:every=1`) there are none. Work that always or never falls into a sampled
step is over- or underestimated. If a call raises, only the nested modules that had returned are counted, and the self
times add up to more than the root's time. `torch.autograd.grad`, and data that do not come from a DataLoader, are
`other`. Attention written as a function and compiled modules have no FLOPs here; a second backward through the same
graph adds none. With tensor parallelism, each rank counts the whole layer. For a model on several GPUs, `peak_flops` is
that of the first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd import Context, Module, Plugin, accelerators, hookimpl
from hookd_timing.device import DIRECTIONS, Device, is_in_use
from hookd_timing.flops import has_formula
from hookd_timing.throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd import Counter


class Timing(Plugin):
    """Times modules and the phases of a step.

    hookd itself adds up the times of all forward calls, and of the backward passes in sampled steps. Reading shapes and
    recording events in a stream cost microseconds, so both are sampled as well.
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
        again = _families(context, "recompute", "of calls repeated by activation checkpointing")
        _add_up(context, again, recompute=True)
        _add_up(context, _families(context, "inference", "of calls that no backward follows"), inference=True)
        self.of_backward = _families(context, "backward", "of the module's backward, estimated from sampled steps")
        _add_up(context, self.of_backward, backward=True)
        context.add_up_phases(context.counter("phase_seconds", "Wall time of the training thread by phase.", ["phase"]))
        self.throughput = Throughput(context)
        self.device = Device(context)
        self.rotates = is_in_use()
        self._listen()

    @hookimpl
    def select(self, module: Module) -> set[str]:
        """Select the hooks that are worth their cost for this module; without CUDA, only shapes are read."""
        if accelerators():
            hooks = {"forward", "backward", "forward_pre", "backward_pre"}
            return hooks if module.depth else hooks | {"root_forward_pre", "root_forward"}
        if module.depth == 0:
            return {"forward", "forward_pre", "backward", "root_forward_pre"}
        return {"forward", "forward_pre", "backward"} if has_formula(module.torch()) else {"forward", "backward_totals"}

    @hookimpl(trylast=True)
    def forward_pre(self, module: Module, inputs: tuple[Any, ...], kwargs: Mapping[str, object]) -> None:
        """Read the shapes of a sampled step, or begin to time the device."""
        self.device.note_sampled()
        if self.device.is_forward:
            self.device.begin_forward(module, inputs, kwargs)
            return
        if module.depth == 0 and module not in self.context.stack()[:-1]:
            self.throughput.begin_call()
        self.throughput.see(module, inputs, kwargs)

    @hookimpl(tryfirst=True)
    def forward(self, module: Module) -> None:
        """End the timing of the device; wall time is added up without this hook."""
        self.device.end_forward(module)

    @hookimpl(trylast=True)
    def root_forward_pre(
        self, module: Module, inputs: tuple[Any, ...], kwargs: Mapping[str, object], inference: bool
    ) -> None:
        """Count samples; begin to time a whole model on the device, in a step in which nothing else is timed."""
        if not inference:
            self.throughput.see_root(module, inputs, kwargs)
        if self.device.is_root:
            self.device.begin_root(module)

    @hookimpl(tryfirst=True)
    def root_forward(self, module: Module) -> None:
        """End the timing of a whole model."""
        self.device.end_root(module)

    @hookimpl(trylast=True)
    def backward_pre(self, module: Module) -> None:
        """Begin to time the device."""
        self.device.begin_backward(module)

    @hookimpl(tryfirst=True)
    def backward(self, module: Module, elapsed_ns: int, self_ns: int) -> None:
        """Count the operations of a backward, and on a device its time, for all the steps that this one represents."""
        self.throughput.see_backward(module)
        # With a rotation hookd adds up nothing by itself: a sampled step also represents those of the other direction.
        if self.rotates:
            self.device.end_backward(module)
            _add(
                self.backwards, self.of_backward, module, elapsed_ns, self_ns, float(DIRECTIONS * self.context.interval)
            )

    @hookimpl
    def step_done(self) -> None:
        """End a step."""
        self.throughput.step_done()
        if is_in_use():  # a model may move to the device at any time
            self.rotates = True
            self.device.step_done()
        self._listen()

    def _listen(self) -> None:
        """Enable the hooks of the next turn on a device; without one, those that read shapes, when that is due."""
        forward, listen = self.device.is_forward, self.context.listen
        looks = self.rotates or self.throughput.is_due()
        listen("forward_pre", wanted=looks)
        listen("forward", wanted=self.rotates)
        listen("backward_pre", wanted=self.rotates and not forward)
        listen("backward", wanted=looks and not forward)
        listen("backward_totals", wanted=not self.rotates)
        listen("root_forward", wanted=self.device.is_root)


def _families(context: Context, direction: str, text: str) -> tuple[Counter, Counter, Counter]:
    of_module = ["module"]
    return (
        context.counter(f"{direction}_seconds", f"Wall time {text}, children included.", of_module),
        context.counter(f"{direction}_self_seconds", f"Wall time {text}, without nested modules.", of_module),
        context.counter(f"{direction}_calls", f"Number {text}.", of_module),
    )


def _add_up(
    context: Context, families: tuple[Counter, Counter, Counter], *, recompute: bool = False, inference: bool = False,
    backward: bool = False,
) -> None:  # fmt: skip
    seconds, own, calls = families
    kind = {"recompute": recompute, "inference": inference, "backward": backward}
    context.add_up(seconds=seconds, self_seconds=own, calls=calls, **kind)


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
