"""The context of a plugin: its options, its metrics, and the state of the training."""

from __future__ import annotations

import sys
from math import inf
from typing import TYPE_CHECKING, Any, Callable, Protocol, TypeVar

from hookd.api.globs import Globs
from hookd.api.metrics import Counter, Gauge, Histogram
from hookd.api.passive import groups_of
from hookd.api.requests import Requests
from hookd.api.shown import STATISTICS, ZEROS, Shown
from hookd.api.totals import INFERENCE, RECOMPUTE, TRAINING, BackwardTotals, Families, Totals
from hookd.errors import PluginError
from hookd.wire.module_names import described, is_bare
from hookd.wire.page.layout import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from hookd.api.digest import Digest
    from hookd.api.events import Module, Returned
    from hookd.api.summary import Largest, Summary
    from hookd.wire.page import PageWriter

    Numbers = Callable[[list[float]], None]

T = TypeVar("T")
M = TypeVar("M", Counter, Gauge, Histogram)

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _author_line() -> str:
    """Return `file:line` of the plugin code, three frames up: it called a context method, which called the caller of this."""
    frame = sys._getframe(3)  # noqa: SLF001
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Numeric(Protocol):
    """Arithmetic that a context needs; the methods of `Context` describe each."""

    def summary(self, context: Context, tensor: Tensor, then: Callable[[Summary], None] | None) -> Summary | None: ...  # noqa: D102
    def digest(  # noqa: D102
        self, context: Context, tensor: Tensor, then: Callable[[Digest], None] | None, lost: Callable[[], None] | None
    ) -> Digest | None: ...
    def is_finite(self, tensor: Tensor, *, masks: bool) -> bool | Tensor: ...  # noqa: D102
    def extremes(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None: ...  # noqa: D102
    def largest(self, tensors: Iterable[Tensor]) -> list[float | Tensor]: ...  # noqa: D102

    at_once: Callable[[list[Any], bool, int], float | None]

    def largest_each(self, tensors: Iterable[Tensor]) -> list[Largest]: ...  # noqa: D102
    def is_readable(self, tensor: Tensor) -> bool: ...  # noqa: D102
    def number(self, tensor: Tensor) -> float | None: ...  # noqa: D102
    def ask(  # noqa: D102
        self, context: Context, values: Sequence[Tensor], then: Numbers, lost: Callable[[], None] | None
    ) -> None: ...


class Host(Protocol):
    """The agent, as far as a context needs it."""

    @property
    def page(self) -> PageWriter: ...  # noqa: D102
    @property
    def run(self) -> str: ...  # noqa: D102
    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def world_size(self) -> int: ...  # noqa: D102
    @property
    def numeric(self) -> Numeric: ...  # noqa: D102
    def step_now(self) -> int: ...  # noqa: D102
    def step_offset(self) -> int | None: ...  # noqa: D102
    def module_stack(self) -> tuple[Module, ...]: ...  # noqa: D102
    def returned_now(self) -> Sequence[Returned]: ...  # noqa: D102
    def outermost_modules(self) -> list[tuple[Module, nn.Module]]: ...  # noqa: D102
    def optimizers(self) -> list[Optimizer]: ...  # noqa: D102
    def module_states(self) -> list[tuple[Module, str]]: ...  # noqa: D102
    def ordered_parameters(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]: ...  # noqa: D102
    def interval_of(self, plugin: str) -> int: ...  # noqa: D102
    def is_alone(self, plugin: str) -> bool: ...  # noqa: D102
    def resample(self) -> None: ...  # noqa: D102
    def shows_in_c(self) -> bool: ...  # noqa: D102
    def has_seen_all(self, plugin: str) -> bool: ...  # noqa: D102
    def mark_now(self) -> int: ...  # noqa: D102
    def pause(self, plugin: str) -> None: ...  # noqa: D102
    def report_incident(self, plugin: str, kind: str, message: str, fields: Mapping[str, object]) -> None: ...  # noqa: D102
    def write_log(self, level: str, message: str) -> None: ...  # noqa: D102
    def run_in_background(self, plugin: str, work: Callable[[], None]) -> None: ...  # noqa: D102
    def reader_of(self, plugin: str) -> int: ...  # noqa: D102
    def send(self, plugin: str, record: bytes) -> bool: ...  # noqa: D102


class Context:
    """The object through which a plugin talks to hookd.

    Attributes:
        options: the user's `-p NAME:key=value,...`, unparsed; use `option` to read them.
        settings: every option that the plugin has read, with its effective value.
        requests: its requests to the agent. Internal.
    """

    def __init__(self, plugin: str, options: Mapping[str, str], host: Host) -> None:
        self.plugin = plugin
        self.options = dict(options)
        self.settings: dict[str, object] = {}
        self.requests = Requests()
        self._host = host

    # -- options

    def option(
        self,
        name: str,
        default: T,
        choices: Sequence[T] = (),
        kind: type[T] | None = None,
        *,
        least: float | None = None,
        most: float | None = None,
    ) -> T:
        """Read one option; it has the type of `default`, or `kind` where the default is None.

        Raises:
            PluginError: the value is not of that type, not one of `choices`, or not from `least` to `most`.
        """
        self.settings[name] = default
        if name not in self.options:
            return default
        value: T = self._parse(name, self.options[name], kind if kind is not None else type(default))
        if choices and value not in choices:
            allowed = ", ".join(str(c) for c in choices)
            raise PluginError(f"{self.plugin}: {name} must be one of {allowed}, not {self.options[name]!r}")
        self._check_range(name, value, least, most)
        self.settings[name] = value
        return value

    def _check_range(self, name: str, value: Any, least: float | None, most: float | None) -> None:
        if (least is not None and not value >= least) or (most is not None and not value <= most):  # a NaN is neither
            limits = [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None)
            raise PluginError(f"{self.plugin}: {name} must be {' and '.join(limits)}, not {self.options[name]}")

    def _parse(self, name: str, text: str, kind: type[Any]) -> Any:
        if kind is bool:
            if text.lower() in TRUE + FALSE:
                return text.lower() in TRUE
        elif kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                pass
        else:
            return text
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise PluginError(f"{self.plugin}: {name} must be {expected}, not {text!r}")

    def globs(self, name: str, default: str = "*") -> Globs:
        """Read an option that selects names by patterns: `encoder.*|head`."""
        return Globs(name, self.option(name, default))

    # -- modules

    def per_module(self) -> dict[int, Any]:
        """Return an empty dict for per-module data, by module `id`; entries of modules that are gone are removed."""
        table: dict[int, Any] = {}
        self.requests.tables.append(table)
        return table

    def add_up(
        self,
        *,
        seconds: Counter | None = None,
        self_seconds: Counter | None = None,
        calls: Counter | None = None,
        recompute: bool = False,
        inference: bool = False,
        backward: bool = False,
    ) -> None:
        """Add every call of the training, at the modules where the plugin listens to `forward`, to counters, without a hook.

        It costs a few additions at every call of every step, and no function of the plugin. In `configure` only.
        If the plugin has `backward` in `sampled`, backward passes are added in sampled steps, weighted by the number of steps that
        a sampled one represents: an estimate. `listen("backward_totals", wanted=False)` ends that.

        Args:
            seconds: time in the calling thread, nested modules included. A call nested in another call of the same module adds
                nothing, since the outer call includes it. This counter and the others have the label `module`.
            self_seconds: time without nested modules.
            calls: number of calls.
            recompute: add the calls that activation checkpointing repeats instead.
            inference: add the calls that no backward follows instead.
            backward: add the backward passes of the modules at which the plugin listens to `backward`, and no calls. A plugin that
                wants these totals of a module, but not the hook, returns `backward_totals` from `select` instead of `backward`.
        """
        if backward:
            if self.requests.backward_totals is None:
                self.requests.backward_totals = BackwardTotals(self._host.page.cells, self.per_module())
            self.requests.backward_totals.families.append(Families(seconds, self_seconds, calls))
            return
        if self.requests.totals is None:
            self.requests.totals = Totals(self._host.page.cells, tuple(self.per_module() for _ in range(3)))
        kind = INFERENCE if inference else RECOMPUTE if recompute else TRAINING
        self.requests.totals.families[kind].append(Families(seconds, self_seconds, calls))

    def show_outputs(self, gauges: Mapping[str, Gauge], *, zeros: float = inf) -> Shown:
        """Set gauges to output statistics of the modules at which the plugin listens to `output_summary`. In `configure` only.

        It works in sampled steps if the plugin has `output_summary` in `sampled`, else in all. `listen("output_summary", wanted=False)` ends it.

        Args:
            gauges: each with the label `module`, by the statistic: mean, std, min, max, absmax, norm, zero_ratio, nonfinite, which are
                attributes of `Summary`.
            zeros: the hook `output_summary` is called for outputs of which at least this share is 0, and for the first output after them.

        Returns:
            An object whose `has_looked()` returns whether any output was read since its last call.

        Raises:
            PluginError: the statistic does not exist, or the metric is not such a gauge.
        """
        for name, gauge in gauges.items():
            if name not in STATISTICS:
                raise PluginError(
                    f"{self.plugin}: no such statistic: {name!r}", hint=f"There are {', '.join(STATISTICS)}."
                )
            if gauge.kind != "gauge" or gauge.label_names != ("module",):
                raise PluginError(f"{self.plugin}: {gauge.name} is not a gauge with the single label `module`")
        if self.requests.shown is None:
            self.requests.shown = Shown(self, self._host.page.cells)
        self.requests.shown.gauges.update(gauges)
        self.requests.shown.standing[ZEROS] = zeros
        return self.requests.shown

    @property
    def shows_in_c(self) -> bool:
        """Whether `show_outputs` works in C here; if not, a `forward` hook costs no more."""
        return self._host.shows_in_c()

    def add_up_phases(self, seconds: Counter) -> None:
        """Add the wall time of training threads to a counter by phase, without the hook `phase`. In `configure` only.

        Args:
            seconds: has the label `phase`: data (waiting for a DataLoader of torch), forward, backward, collectives (the end of
                a backward, when all gradients are computed and the thread waits for other ranks), optimizer, other, and
                inference (calls that no backward follows, with the time between them).
                Together they are the time since a thread's first change of phase; a thread that never runs a backward or a step is not counted.
        """
        names = ("data", "forward", "backward", "collectives", "optimizer", "inference", "other")
        self.requests.phases.append({PHASES.index(name): seconds.labels(name) for name in names})

    # -- metrics

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """Declare the counter `hookd_<plugin>_<name>` (exposed with `_total`, which `name` does not carry)."""
        return self._declare(Counter(self._host.page, self._full(name), help, tuple(labels), bound=self.requests.bound))

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare the gauge `hookd_<plugin>_<name>`."""
        return self._declare(Gauge(self._host.page, self._full(name), help, tuple(labels), bound=self.requests.bound))

    def histogram(self, name: str, help: str, labels: Sequence[str] = (), *, buckets: Sequence[float]) -> Histogram:
        """Declare the histogram `hookd_<plugin>_<name>` with these upper bounds of its buckets, ascending, without +Inf."""
        return self._declare(
            Histogram(self._host.page, self._full(name), help, tuple(labels), tuple(buckets), bound=self.requests.bound)
        )

    @property
    def metrics(self) -> Sequence[Counter | Gauge | Histogram]:
        """The metrics that the plugin has declared: in `succeed`, a gauge can `adopt` that of the predecessor."""
        return self.requests.metrics

    def _declare(self, metric: M) -> M:
        self.requests.metrics.append(metric)
        return metric

    def _full(self, name: str) -> str:
        if name.endswith("_total"):
            at = _author_line()
            raise PluginError(
                f"{self.plugin}: name the metric {name[:-6]!r}: counters get '_total' by themselves ({at})"
            )
        return f"hookd_{self.plugin}_{name}"

    # -- reports

    def incident(self, kind: str, message: str, **fields: Any) -> None:
        """Report an incident to a person, with JSON-able `fields`. Never call it at every step."""
        self._host.report_incident(self.plugin, kind, message, fields)

    def log(self, message: str) -> None:
        """Write a line into the agent's log, which the daemon prints; never to the target's own output."""
        self._host.write_log("info", f"{self.plugin}: {message}")

    def pause(self) -> None:
        """Block this thread, and so the training, until this plugin is changed or unloaded, or hookd detaches.

        Only a mutator may do this, since it delays the training. Other ranks wait for this one at their next
        collective. Signal handlers run meanwhile.
        """
        self._host.pause(self.plugin)

    def aside(self, work: Callable[[], None]) -> None:
        """Run slow work, such as writing a file, in hookd's own thread, after earlier work of this kind.

        A detach waits up to 30 s for it, and the end of the process 10 s; a write may be cut short. An exception counts as the
        plugin's error. At most 100 pieces of a plugin's work wait; another one is an error, and does not run.

        Args:
            work: must not draw random numbers, and touch no tensor but those that the plugin has made itself.
        """
        self._host.run_in_background(self.plugin, work)

    @property
    def reader(self) -> int:
        """The number of the stream in which a tool reads what this plugin sends, from 1; 0 if none does. The next tool has another."""
        return self._host.reader_of(self.plugin)

    def send(self, record: bytes) -> bool:
        """Append a record to the stream that a tool reads, such as `hookd fingerprint`; in one thread at a time.

        It is copied into memory that the tool has made, which takes as long as the copy, and outlives this process.

        Returns:
            Whether it was written. It is not if no tool reads, or if the tool is too slow and its memory is full: nothing waits.
        """
        return self._host.send(self.plugin, record)

    # -- the numbers of a tensor

    def summary(self, tensor: Tensor, then: Callable[[Summary], None] | None = None) -> Summary | None:
        """Return all statistics of a tensor: mean, spread, range, norm, and the amounts of 0, NaN and infinity.

        In host memory this takes one pass, without the interpreter's lock. On a device, the sums are computed there and
        arrive a step later; nothing waits for them.

        Args:
            tensor: of any kind and type. For sparse and nested tensors the stored values count, for distributed ones this
                rank's part. It is not modified, and not kept.
            then: called with the summary: at once if it is known, else after a later step, in the training thread.

        Returns:
            None if the tensor has no numbers (integers, empty, meta, quantized; `then` is not called), or if it is on
            a device (`then` is not called if the sums cannot be read from it).
        """
        return self._host.numeric.summary(self, tensor, then)

    def digest(
        self,
        tensor: Tensor,
        then: Callable[[Digest], None] | None = None,
        lost: Callable[[], None] | None = None,
    ) -> Digest | None:
        """Return a digest of a tensor's bits, and how large its elements are.

        In host memory this takes one pass, without the interpreter's lock. On a device, both are computed there, by some 25 operations,
        and arrive a step later; nothing waits for them.

        Args:
            tensor: of any type. One with gaps in its memory is copied first. Of a distributed one this rank's part counts. It is not
                modified, and not kept.
            then: called with the digest: at once if it is known, else after a later step, in the training thread.
            lost: called in place of `then`, without arguments, if there is no digest: the tensor is sparse, nested, or without memory,
                or cannot be read from its device; also in host memory where hookd has no native part.

        Returns:
            None if there is no digest, or if the tensor is on a device.
        """
        return self._host.numeric.digest(self, tensor, then, lost)

    def is_finite(self, tensor: Tensor, *, masks: bool = False) -> bool | Tensor:
        """Return whether no element is NaN or infinite; much faster than a summary, and safe from overflow.

        Args:
            tensor: as in `summary`; one without numbers is finite.
            masks: count `-inf` as finite, since attention masks consist of it.

        Returns:
            For a tensor on a device, a boolean tensor of 0 dimensions that stays there: see `later`.
        """
        return self._host.numeric.is_finite(tensor, masks=masks)

    def extremes(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the smallest and the largest element, both NaN if there is a NaN; nothing waits for a device.

        Returns:
            Two tensors of 0 dimensions on the same device; None if the tensor has no numbers.
        """
        return self._host.numeric.extremes(tensor)

    def largest(self, tensors: Iterable[Tensor]) -> list[float | Tensor]:
        """Return the largest magnitude in many tensors, such as all gradients; NaN if there is a NaN. Nothing can overflow.

        Returns:
            One number for each location: a float for all tensors in host memory, then for each device and type a
            tensor of 0 dimensions that stays there. Empty if no tensor has numbers.
        """
        return self._host.numeric.largest(tensors)

    def largest_each(self, tensors: Iterable[Tensor]) -> list[Largest]:
        """Return the same, and on a device the largest of each tensor, so that the bad one can be identified later.

        Returns:
            A `Largest` for each location: its `value`, and `at`, the positions of its tensors among the arguments. A tensor
            without numbers is in none.
        """
        return self._host.numeric.largest_each(tensors)

    def largest_gradient(self, optimizer: Optimizer, most_elements: int = sys.maxsize) -> float | None:
        """Return the largest magnitude in the gradients that an optimizer would use, NaN if there is a NaN, without touching any.

        Reading `parameter.grad` creates a Python object for each, which costs more than reading a small gradient.

        Args:
            optimizer: its parameters are read from its groups.
            most_elements: gradients with more elements are not read.

        Returns:
            0 if there are none. None if they must be read one by one, with `largest_each`: they are not all of one type,
            not all plain tensors in host memory, or calls are not entered in C.
        """
        groups = [group["params"] for group in groups_of(optimizer)]
        parameters = groups[0] if len(groups) == 1 else [parameter for group in groups for parameter in group]
        return self._host.numeric.at_once(parameters, True, most_elements) if type(parameters) is list else None

    def is_readable(self, tensor: Tensor) -> bool:
        """Whether torch's operations can read the elements of a tensor of the training; check before using one.

        They crash the process on a tensor without memory: freed by an offloading engine, or a parameter whose class keeps
        its numbers elsewhere. The five methods above check this themselves.

        Returns:
            False also for an empty tensor, and for sparse, nested and other kinds that are not one block of torch's own.
        """
        return self._host.numeric.is_readable(tensor)

    def number(self, tensor: Tensor) -> float | None:
        """Return the only element of a real tensor in the host's memory, such as a loss; None of any other: use `later`."""
        return self._host.numeric.number(tensor)

    def later(self, values: Sequence[Tensor], then: Numbers, lost: Callable[[], None] | None = None) -> None:
        """Read small tensors without waiting for their device: `then` is called with all their elements in one list.

        The call comes after a later step, in the training thread; for tensors in host memory, after this step. Where many numbers
        wait, as in a validation, it can come between two calls. All requests of a step, of all plugins, cost one copy, and are
        answered in their order. If the plugin was unloaded or quarantined meanwhile, it is not called.

        Args:
            values: of one device and of any real type; their numbers arrive as float64.
            then: must not delay the training, like a hook; an exception counts as the plugin's error.
            lost: called in place of `then`, without arguments, if the tensors cannot be read: their memory was freed, or the device
                has none left for the copy. Needed if other numbers wait for these.
        """
        self._host.numeric.ask(self, values, then, lost)

    # -- state of the training

    @property
    def run(self) -> str:
        """The name of the training job."""
        return self._host.run

    @property
    def rank(self) -> int:
        """The rank of this process in its job, 0 for a job of one."""
        return self._host.rank

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self._host.world_size

    @property
    def step(self) -> int:
        """The number of the step in progress, from 1; counted from the attach unless `is_step_absolute`."""
        return self._host.step_now()

    @property
    def mark(self) -> int:
        """How many collectives the job's default process group had begun when the step's optimizer was called.

        All ranks begin the same ones in the same order: the same number means the same step on each, whatever its number there.
        0 in a job of one rank, and where torch does not count them.
        """
        return self._host.mark_now()

    @property
    def is_step_absolute(self) -> bool:
        """Whether `step` counts from the beginning of the training."""
        return self._host.step_offset() is not None

    @property
    def origin(self) -> str:
        """The step in progress in words, with what it counts from where that is not the training's beginning."""
        return f"step {self.step}" + ("" if self.is_step_absolute else " (counted from the attach)")

    def stack(self) -> tuple[Module, ...]:
        """Return the modules that this thread is inside of, the outermost first."""
        return self._host.module_stack()

    def returned(self) -> Sequence[Returned]:
        """Return the outputs of the module calls in this thread's outermost call, in the order of returning.

        Available at every step, sampled or not, to a plugin whose `remembers` is true. During the outermost call these are
        all calls whose outputs are alive; small outputs are kept for that. Afterwards, until the next one, the last 32.
        """
        return self._host.returned_now()

    def models(self) -> list[tuple[Module, nn.Module]]:
        """Return the root of each model seen, in the order of their first calls, with the module that the training calls.

        That is the root's own module, or a DistributedDataParallel around it. Never keep them.
        """
        return self._host.outermost_modules()

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have made a step since the attach. Never keep them."""
        return self._host.optimizers()

    def module_states(self) -> list[tuple[Module, str]]:
        """Return every module of all models seen, with its coverage, parents first.

        `observed`; `compiled` and `scripted` (their calls are not seen); `never_called` since the attach, though its
        model was trained a step; `bypassed`, when such a module's parameters get gradients all the same: some code calls
        `.forward()` or uses the parameters in a function. Empty for a module without a `forward` of its own (ModuleList),
        and where no plugin listens.
        """
        return self._host.module_states()

    def described(self, name: str) -> str:
        """Return the name of a module as people read it: with its class if indices are all there is, as in `3 (Linear)`."""
        kinds = (
            (module.type for module, _ in self._host.module_states() if module.name == name) if is_bare(name) else ()
        )
        return described(name, next(iter(kinds), ""))

    def ordered_parameters(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
        """Return the parameters of `optimizer`, in the models' order, with their names.

        The order decides the bits of a norm: `clip_grad_norm_(model.parameters())` sums in the model's order, which
        is not the optimizer's where it has several groups. Parameters of no known model come last.
        """
        return self._host.ordered_parameters(optimizer)

    # -- how often the sampled hooks are called

    @property
    def interval(self) -> int:
        """How many steps lie between two sampled steps of this plugin right now."""
        return self._host.interval_of(self.plugin)

    @property
    def is_alone(self) -> bool:
        """Whether no sampled hook of any other plugin is called in the step in progress; see `Plugin.apart`."""
        return self._host.is_alone(self.plugin)

    def hold(self, interval: int | None, *hooks: str) -> None:
        """Call sampled hooks once in `interval` steps from now on, whatever they cost; None restores the former interval.

        For a plugin that has detected something and must look closely until it knows more. It takes effect at once, from any
        hook: in a module call that is under way, nested calls that have not returned yet are seen.

        Args:
            interval: in steps.
            hooks: names of hooks; empty means all.
        """
        held = {hook: steps for hook, steps in self.requests.held.items() if hook not in hooks} if hooks else {}
        if interval is not None:
            held.update(dict.fromkeys(hooks or ("",), interval))
        if held != self.requests.held:
            self.requests.held = held
            self._host.resample()

    def has_seen_all(self) -> bool:
        """Return whether hookd has checked all outputs of observed modules so far in this thread's outermost call.

        For a plugin that listens to `suspect`, in its hooks on calls: outputs not passed to `suspect` were finite, or -inf.
        Outputs of calls that activation checkpointing repeats are not included.
        """
        return self._host.has_seen_all(self.plugin)

    def listen(self, hook: str, *, wanted: bool) -> None:
        """Enable or disable one of the plugin's hooks from its next event on; from any hook, any number of times.

        A hook called at every step costs up to 0.1 ms even if it does nothing, since its data has left the processor's cache
        since the last step. Disable a hook that seldom has work, if another hook knows when.
        """
        if wanted == (hook in self.requests.unwanted):
            (self.requests.unwanted.discard if wanted else self.requests.unwanted.add)(hook)
            self._host.resample()
