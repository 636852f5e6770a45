"""hookd and the tools that a user might choose instead, each as a wrapper around some steps of a training.

A tool is opened once for a training, and then applied to one block after the other. What it does at the opening and
around a block (starting a run, adding hooks) is not measured; what it does in the steps is.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as global_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from hookd.api.inprocess import DEFAULT
from hookd.target.tensors import kernel
from tests.bench.attached import Attached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from tests.bench.workloads import Job

SAMPLED_STEPS = 10
"""The sampling interval at the default rates; where the governor chooses a longer one, the mean counts."""


@dataclass(frozen=True)
class Tool:
    """One row of the comparison.

    Attributes:
        delivers: what a user gets for the cost, in a line.
        opened: opens the tool for a training.
        steps: the number in a block.
        beside: the name of hookd's row that delivers the same, or more.
        package: the package that it needs.
        samples: whether its work differs from step to step, so that its mean counts, not its median.
    """

    name: str
    delivers: str
    opened: Callable[[Job], AbstractContextManager[Callable[[], AbstractContextManager[object]]]]
    steps: int = 1
    beside: str = ""
    package: str = ""
    samples: bool = False

    @property
    def is_installed(self) -> bool:
        return not self.package or find_spec(self.package) is not None

    @property
    def label(self) -> str:
        return (
            f"{self.name} ({self.package} {version(self.package)})" if self.package and self.is_installed else self.name
        )


# -- hookd


def _hookd(*plugins: object, settled: int = 10) -> Any:
    @contextlib.contextmanager
    def opened(job: Job) -> Iterator[Any]:
        with Attached(plugins) as attached:
            attached.settle(job.step, settled)
            attached.leave()
            yield attached.on

    return opened


SETTLED_STEPS = 400
"""By then the governor must have found its intervals."""

NOTHING = "attached, nothing listening"
OBSERVERS = "default observers"
NAN = "nan:every=1"
FORWARD = "timing"
TIMING = "timing:every=1"
OUTPUTS = "activations:every=1,gradients=false"
ALL = "activations:every=1"

HOOKD = [
    Tool(NOTHING, "steps, step times, phases, heartbeat, coverage; no module is looked at", _hookd(), 2),
    Tool(OBSERVERS, "nan + timing + activations at their default rates, as the governor sets them for 1 %", _hookd(*DEFAULT, settled=SETTLED_STEPS),
         SAMPLED_STEPS, samples=True),
    Tool(NAN, "the module that made the first NaN or infinity, exact in every step; gradients, loss and parameters",
         _hookd(("nan", {"every": 1}), settled=SETTLED_STEPS), 1, samples=True),
    Tool(FORWARD, "forward and own time and calls of every module in every step; backward and FLOPs of one in ten or more",
         _hookd("timing", settled=SETTLED_STEPS), 4, samples=True),
    Tool(TIMING, "forward, backward and own time, calls, samples and FLOPs of every module in every step",
         _hookd(("timing", {"every": 1})), 1),
    Tool(OUTPUTS, "8 statistics of every module's output in every step, and findings",
         _hookd(("activations", {"every": 1, "gradients": False})), 1),
    Tool(ALL, "the same, and norms, updates and noise of every module's gradients and weights in every step",
         _hookd(("activations", {"every": 1})), 1),
]  # fmt: skip


# -- torch


def _each_block(make: Callable[[Job], AbstractContextManager[object]]) -> Any:
    """Open a tool that has no state beyond a block."""

    @contextlib.contextmanager
    def opened(job: Job) -> Iterator[Any]:
        yield lambda: make(job)

    return opened


@contextlib.contextmanager
def _removed(handles: Iterable[Any]) -> Iterator[None]:
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


def no_op(*_: object) -> None:
    """Accept the arguments of any hook, and ignore them."""


def forward_hooks(_job: object = None) -> AbstractContextManager[None]:
    pre, post = global_hooks.register_module_forward_pre_hook, global_hooks.register_module_forward_hook
    return _removed([pre(no_op), post(no_op)])


def backward_hooks(job: Job) -> AbstractContextManager[None]:
    return _removed(module.register_full_backward_hook(no_op) for module in job.model.modules())


def _on_outputs(take: Callable[[Any], object]) -> Any:
    """Pass every floating-point tensor that a module returns to a function that reads numbers with `.item()`."""

    def hooks(job: Job) -> AbstractContextManager[None]:
        found: dict[Any, object] = {}

        def hook(module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                with torch.no_grad():
                    found[module] = take(output)

        return _removed(module.register_forward_hook(hook) for module in job.model.modules())

    return _each_block(hooks)


@contextlib.contextmanager
def _kernel_alone(_job: Job) -> Iterator[None]:
    """Read every output and every gradient, and do nothing else: the lower bound of every tool that reads from Python."""
    made = kernel.load()
    assert made is not None, "python hookd/native/build.py"

    def forward(_module: Any, _inputs: Any, output: Any) -> None:
        if type(output) is torch.Tensor and output.is_contiguous():
            made.is_finite(output)

    def step_pre(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        made.largest([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])

    with _removed([global_hooks.register_module_forward_hook(forward), register_optimizer_step_pre_hook(step_pre)]):
        yield
    made.close()


@contextlib.contextmanager
def _gate_alone(_job: Job) -> Iterator[None]:
    """Read every gradient before it is used, and do nothing else."""
    made = kernel.load()
    assert made is not None, "python hookd/native/build.py"

    def step_pre(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        made.largest([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])

    with _removed([register_optimizer_step_pre_hook(step_pre)]):
        yield
    made.close()


def statistics(x: torch.Tensor) -> list[float]:
    """Return the statistics that hookd's kernel computes in one pass, as a person would write them."""
    found = (x.mean(), x.std(), x.min(), x.max(), x.abs().max(), x.norm(), (x == 0).float().mean(), x.isnan().sum(),
             x.isinf().sum())  # fmt: skip
    return [one.item() for one in found]


def _profiler(_job: Job) -> AbstractContextManager[object]:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_modules=True
    )


def _flops(_job: Job) -> AbstractContextManager[object]:
    return FlopCounterMode(display=False)


TORCH = [
    Tool("no-op global forward hooks", "nothing; the least that torch's own hooks cost", _each_block(forward_hooks),
         1, OBSERVERS),
    Tool("no-op full backward hooks on every module", "nothing; gradients change in the last bit, in-place code fails",
         _each_block(backward_hooks), 1, TIMING),
    Tool("autograd.detect_anomaly", "the forward call whose backward made the first NaN; stops the training there",
         _each_block(lambda _job: torch.autograd.detect_anomaly()), 1, NAN),
    Tool("hookd's kernel on the gradients alone", "whether a gradient is not finite; what the default observers do besides is above it",
         _each_block(_gate_alone), 1, OBSERVERS),
    Tool("torch's hook and hookd's kernel alone", "whether all outputs and gradients are finite; the floor of nan:every=1",
         _each_block(_kernel_alone), 1, NAN),
    Tool("hooks with isfinite().all().item()", "which modules' outputs are not finite, in every step",
         _on_outputs(lambda x: x.isfinite().all().item()), 1, NAN),
    Tool("hooks with statistics by .item()", "9 statistics of every module's output in every step",
         _on_outputs(statistics), 1, OUTPUTS),
    Tool("torch.profiler, shapes and modules", "a trace of every operation, to be read when it is over",
         _each_block(_profiler), 1, TIMING),
    Tool("FlopCounterMode", "operations of every module, forward and backward", _each_block(_flops), 1, TIMING),
    Tool("ModuleTracker", "which modules run now, in forward and backward",
         _each_block(lambda _job: ModuleTracker()), 1, TIMING),
]  # fmt: skip


# -- others


@contextlib.contextmanager
def _wandb(job: Job) -> Iterator[Any]:
    """Watch gradients and parameters in a run that stays on this machine; nobody calls `wandb.log`."""
    import wandb

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        run.watch(job.model, log="all", log_freq=1, idx=0)
        try:
            yield
        finally:
            run.unwatch(job.model)

    settings = wandb.Settings(silent=True, console="off")
    with (
        tempfile.TemporaryDirectory() as directory,
        wandb.init(mode="offline", dir=directory, project="bench", settings=settings) as run,
    ):
        yield watching
    wandb.teardown()  # its service is a process


def _debug_overflow(job: Job) -> AbstractContextManager[None]:
    from transformers.debug_utils import DebugUnderflowOverflow

    @contextlib.contextmanager
    def debugging() -> Iterator[None]:
        DebugUnderflowOverflow(job.model)
        try:
            yield
        finally:
            for module in job.model.modules():  # it returns no handles, and nobody else has put hooks on these
                module._forward_hooks.clear()

    return debugging()


def _probing(spec: str) -> Any:
    @contextlib.contextmanager
    def opened(job: Job) -> Iterator[Any]:
        from probing.profiling.torch import install_hooks, uninstall_hooks
        from probing.profiling.torch_probe import TorchProbe, TorchProbeConfig

        tracer = TorchProbe(TorchProbeConfig.parse(spec))

        @contextlib.contextmanager
        def probing() -> Iterator[None]:
            install_hooks(job.model, tracer=tracer)
            install_hooks(opt=job.optimizer, tracer=tracer)
            try:
                yield
            finally:
                uninstall_hooks()

        with probing():
            job.block(10)  # it learns the modules
        yield probing

    return opened


OTHERS = [
    Tool("wandb.watch, log_freq=1", "histograms of every gradient and parameter in every step (by default in one of 1,000)",
         _wandb, 1, ALL, "wandb"),
    Tool("DebugUnderflowOverflow", "the first output or weight that is not finite, with the 21 calls before it",
         _each_block(_debug_overflow), 1, NAN, "transformers"),
    Tool("probing, one module a step", "forward time and memory of one module in each step", _probing("on"), 1,
         FORWARD, "probing"),
    Tool("probing, every module", "forward time and memory of every module in every step", _probing("random:1.0"), 1,
         FORWARD, "probing"),
]  # fmt: skip

TOOLS = {tool.name: tool for tool in (*HOOKD, *TORCH, *OTHERS)}
