"""What a plugin is given: its options, its metrics, and where the training stands. Runs in the target."""

from __future__ import annotations

import difflib
import sys
from math import inf
from typing import TYPE_CHECKING, Any, Callable, Protocol, TypeVar

from hookd.api.globs import Globs
from hookd.api.metrics import Counter, Gauge, Histogram
from hookd.api.passive import groups_of
from hookd.api.shown import STATISTICS, ZEROS, Shown
from hookd.api.totals import BackwardTotals, Families, Totals
from hookd.errors import PluginError
from hookd.wire.page.layout import PHASES
from hookd.wire.page.series import Bound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from hookd.api.events import Module, Returned
    from hookd.api.metrics import CounterChild
    from hookd.api.summary import Largest, Summary
    from hookd.wire.page import PageWriter

    Numbers = Callable[[list[float]], None]

T = TypeVar("T")
M = TypeVar("M", Counter, Gauge, Histogram)

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _author_line() -> str:
    """Give `file:line` of who has called a method of the context that has called one that calls this."""
    frame = sys._getframe(3)  # noqa: SLF001
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Numeric(Protocol):
    """What a context needs of arithmetic; the methods below say what each does."""

    def summary(self, context: Context, tensor: Tensor, then: Callable[[Summary], None] | None) -> Summary | None: ...  # noqa: D102
    def is_finite(self, tensor: Tensor, *, masks: bool) -> bool | Tensor: ...  # noqa: D102
    def extremes(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None: ...  # noqa: D102
    def largest(self, tensors: Iterable[Tensor]) -> list[float | Tensor]: ...  # noqa: D102

    at_once: Callable[[list[Any], bool], float | None]

    def largest_each(self, tensors: Iterable[Tensor]) -> list[Largest]: ...  # noqa: D102
    def is_readable(self, tensor: Tensor) -> bool: ...  # noqa: D102
    def number(self, tensor: Tensor) -> float | None: ...  # noqa: D102
    def ask(self, context: Context, values: Sequence[Tensor], then: Numbers) -> None: ...  # noqa: D102


class Host(Protocol):
    """What a context needs of the agent."""

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
    def model_roots(self) -> list[Module]: ...  # noqa: D102
    def outermost_modules(self) -> list[tuple[Module, nn.Module]]: ...  # noqa: D102
    def module_states(self) -> list[tuple[Module, str]]: ...  # noqa: D102
    def ordered_parameters(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]: ...  # noqa: D102
    def interval_of(self, plugin: str) -> int: ...  # noqa: D102
    def is_alone(self, plugin: str) -> bool: ...  # noqa: D102
    def resample(self) -> None: ...  # noqa: D102
    def shows_in_c(self) -> bool: ...  # noqa: D102
    def has_seen_all(self, plugin: str) -> bool: ...  # noqa: D102
    def mark_now(self) -> int: ...  # noqa: D102
    def pause(self, plugin: str) -> None: ...  # noqa: D102
    def report_incident(self, plugin: str, kind: str, message: str, fields: dict[str, Any]) -> None: ...  # noqa: D102
    def write_log(self, level: str, message: str) -> None: ...  # noqa: D102
    def work_aside(self, plugin: str, work: Callable[[], None]) -> None: ...  # noqa: D102


class Context:
    """The one object through which a plugin speaks with hookd.

    Attributes:
        options: what the person gave as `-p NAME:key=value,...`, unparsed; use `option` to read them.
        settings: every option that the plugin has asked for, with the value that is in force.
        bound: how many series it may have.
        totals: what `add_up` has asked for, `backward_totals`, and what `show_outputs` has, as `shown`; hookd's own.
        phases: what `add_up_phases` has, by phase as the page numbers them; hookd's own.
    """

    def __init__(self, plugin: str, options: Mapping[str, str], host: Host) -> None:
        self.plugin = plugin
        self.options = dict(options)
        self.metrics: list[Counter | Gauge | Histogram] = []
        self.bound = Bound()
        self._per_module: list[dict[int, Any]] = []
        self._host = host
        self.settings: dict[str, object] = {}
        self._fixed: dict[str, int] = {}
        self._held: dict[str, int] = {}  # by hook; "": all
        self.totals: Totals | None = None
        self.backward_totals: BackwardTotals | None = None
        self.shown: Shown | None = None
        self.phases: list[dict[int, CounterChild]] = []
        self._unwanted: set[str] = set()

    # -- options

    def option(self, name: str, default: T, choices: Sequence[T] = (), kind: type[T] | None = None) -> T:
        """Read one option; it has the type of `default`, or `kind` where the default is None.

        Raises:
            PluginError: the value is not of that type, or not one of `choices`.
        """
        self.settings[name] = default
        if name not in self.options:
            return default
        value: T = self._parse(name, self.options[name], kind if kind is not None else type(default))
        if choices and value not in choices:
            allowed = ", ".join(str(c) for c in choices)
            raise PluginError(f"{self.plugin}: {name} must be one of {allowed}, not {self.options[name]!r}")
        self.settings[name] = value
        return value

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
        """Read an option that chooses names by patterns: `encoder.*|head`."""
        return Globs(name, self.option(name, default))

    def check_options(self) -> None:
        """Refuse the options that `configure` never asked for.

        Raises:
            PluginError: with the nearest known name.
        """
        known = {"every", "readmit", *self.settings}
        for name in self.options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it knows: {', '.join(sorted(known))}"
                raise PluginError(f"{self.plugin}: no such option: {name!r}", hint=hint)

    # -- modules

    def per_module(self) -> dict[int, Any]:
        """Give an empty dict for what belongs to single modules, by their `id`: what is gone is taken out of it."""
        table: dict[int, Any] = {}
        self._per_module.append(table)
        return table

    def forget_modules(self, numbers: Iterable[int]) -> None:
        """Take modules out of these dicts; hookd calls this a minute after a model has gone."""
        for number in numbers:
            for table in self._per_module:
                table.pop(number, None)

    def add_up(
        self,
        *,
        seconds: Counter | None = None,
        self_seconds: Counter | None = None,
        calls: Counter | None = None,
        recompute: bool = False,
        backward: bool = False,
    ) -> None:
        """Have every call of the modules at which the plugin listens to `forward` added to counters, without a hook.

        That needs no function of the plugin's own: a few additions, at every call of every step. In `configure` only.
        Backward passes are added in sampled steps where the plugin has `backward` in `sampled`, for as many steps as such a one
        stands for: an estimate. `listen("backward_totals", wanted=False)` ends that.

        Args:
            seconds: of the calling thread, modules called inside included; of a call inside of another one of the same module
                none, for they are part of that one's. This counter and the others have the label `module`.
            self_seconds: without the modules called inside.
            calls: how many.
            recompute: add the calls that activation checkpointing makes again, and none of the others.
            backward: add the backward passes of the modules at which the plugin listens to `backward`, and no calls. A `select` that names
                `backward_totals` in its place has them added there, and the hook not called.
        """
        if backward:
            if self.backward_totals is None:
                self.backward_totals = BackwardTotals(self._host.page.cells, self.per_module())
            self.backward_totals.families.append(Families(seconds, self_seconds, calls))
            return
        if self.totals is None:
            self.totals = Totals(self._host.page.cells, (self.per_module(), self.per_module()))
        self.totals.families[recompute].append(Families(seconds, self_seconds, calls))

    def show_outputs(self, gauges: Mapping[str, Gauge], *, zeros: float = inf) -> Shown:
        """Have statistics of what modules return put into gauges: of those at which the plugin listens to `output_summary`. In `configure` only.

        It is done in sampled steps if the plugin has `output_summary` in `sampled`, else in all; `listen("output_summary", wanted=False)` ends it.

        Args:
            gauges: each with the label `module`, by the statistic: mean, std, min, max, absmax, norm, zero_ratio, nonfinite, which are
                attributes of `Summary`.
            zeros: the hook `output_summary` is called for outputs of which at least this share is 0, and for the first output after them.

        Returns:
            What says by `has_looked()` whether there was any output to look at since that was asked the last time.

        Raises:
            PluginError: there is no such statistic, or it is no such gauge.
        """
        for name, gauge in gauges.items():
            if name not in STATISTICS:
                raise PluginError(
                    f"{self.plugin}: no such statistic: {name!r}", hint=f"There are {', '.join(STATISTICS)}."
                )
            if gauge.kind != "gauge" or gauge.label_names != ("module",):
                raise PluginError(f"{self.plugin}: {gauge.name} is no gauge with the one label `module`")
        if self.shown is None:
            self.shown = Shown(self, self._host.page.cells)
        self.shown.gauges.update(gauges)
        self.shown.standing[ZEROS] = zeros
        return self.shown

    @property
    def shows_in_c(self) -> bool:
        """Whether `show_outputs` works in C here; if not, a hook `forward` costs no more."""
        return self._host.shows_in_c()

    def add_up_phases(self, seconds: Counter) -> None:
        """Have the wall time of training threads added to a counter by phase, without the hook `phase`. In `configure` only.

        Args:
            seconds: has the label `phase`: data (waiting for a DataLoader of torch), forward, backward, optimizer, other.
                Together they are the time from a thread's first turn on; one that never goes backward or steps is not counted.
        """
        names = ("data", "forward", "backward", "optimizer", "other")
        self.phases.append({PHASES.index(name): seconds.labels(name) for name in names})

    # -- metrics

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """Declare the counter `hookd_<plugin>_<name>` (exposed with `_total`, which `name` does not carry)."""
        return self._declare(Counter(self._host.page, self._full(name), help, tuple(labels), bound=self.bound))

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare the gauge `hookd_<plugin>_<name>`."""
        return self._declare(Gauge(self._host.page, self._full(name), help, tuple(labels), bound=self.bound))

    def histogram(self, name: str, help: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        """Declare the histogram `hookd_<plugin>_<name>` with these upper bounds, ascending, without +Inf."""
        return self._declare(
            Histogram(self._host.page, self._full(name), help, tuple(labels), tuple(buckets), bound=self.bound)
        )

    def _declare(self, metric: M) -> M:
        self.metrics.append(metric)
        return metric

    def _full(self, name: str) -> str:
        if name.endswith("_total"):
            at = _author_line()
            raise PluginError(
                f"{self.plugin}: name the metric {name[:-6]!r}: counters get '_total' by themselves ({at})"
            )
        return f"hookd_{self.plugin}_{name}"

    # -- what to tell

    def incident(self, kind: str, message: str, **fields: Any) -> None:
        """Report something worth telling a person; JSON-able `fields` go with it. Never call it at every step."""
        self._host.report_incident(self.plugin, kind, message, fields)

    def log(self, message: str) -> None:
        """Write a line into the agent's log, which the daemon prints; never to the target's own output."""
        self._host.write_log("info", f"{self.plugin}: {message}")

    def pause(self) -> None:
        """Keep this thread, and so the training, here until somebody changes or takes out this plugin, or hookd leaves.

        A mutator's right alone: it changes when the training goes on. Other ranks wait for this one at their next
        collective. Handlers of signals run meanwhile.
        """
        self._host.pause(self.plugin)

    def aside(self, work: Callable[[], None]) -> None:
        """Do what takes its time, such as writing a file, in a thread of hookd's own, after what was asked for before.

        A detach waits up to 30 s for it, the end of the process 10 s; whoever writes must mind that it can be cut short.
        What it raises is counted as the plugin's error. At most 100 pieces of a plugin's work wait; one more is an error,
        and is not done.

        Args:
            work: must not draw random numbers, and touch no tensor but those that the plugin has made itself.
        """
        self._host.work_aside(self.plugin, work)

    # -- the numbers of a tensor

    def summary(self, tensor: Tensor, then: Callable[[Summary], None] | None = None) -> Summary | None:
        """Give all statistics of a tensor: mean, spread, range, norm, and how much of it is 0, NaN or infinite.

        In the host's memory that is one pass over it, without the interpreter's lock. On a device the sums are made
        there and arrive a step later, and nothing waits for them.

        Args:
            tensor: of any kind and type. Sparse and nested ones give what they store, distributed ones this rank's
                part; it is not modified, and not kept.
            then: is called with the summary: at once if it is known, else after a later step, in the training thread.

        Returns:
            None if the tensor has no numbers (integers, empty, meta, quantized; `then` is not called), or if it is on
            a device.
        """
        return self._host.numeric.summary(self, tensor, then)

    def is_finite(self, tensor: Tensor, *, masks: bool = False) -> bool | Tensor:
        """Say whether no element is NaN or infinite: much quicker than a summary, and no overflow deceives it.

        Args:
            tensor: as in `summary`; one without numbers is finite.
            masks: `-inf` counts as finite: attention masks are made of it.

        Returns:
            Of a tensor on a device a boolean one of 0 dimensions that stays there: see `later`.
        """
        return self._host.numeric.is_finite(tensor, masks=masks)

    def extremes(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give the smallest and the largest element, both NaN if there is one; nothing waits for a device.

        Returns:
            Two tensors of 0 dimensions where the tensor is; None if it has no numbers.
        """
        return self._host.numeric.extremes(tensor)

    def largest(self, tensors: Iterable[Tensor]) -> list[float | Tensor]:
        """Give the largest magnitude in many tensors, such as all gradients: NaN if there is one; nothing can overflow.

        Returns:
            One number for each place: a float for all that are in the host's memory, then for each device and type a
            tensor of 0 dimensions that stays there. Empty if no tensor has numbers.
        """
        return self._host.numeric.largest(tensors)

    def largest_each(self, tensors: Iterable[Tensor]) -> list[Largest]:
        """Give the same, and of what is on a device the largest of each tensor: which one is bad can be told later.

        Returns:
            For each place a `Largest`: its `value`, and `at`, the places of those tensors among the ones given. One
            without numbers is in none.
        """
        return self._host.numeric.largest_each(tensors)

    def largest_gradient(self, optimizer: Optimizer) -> float | None:
        """Return the largest magnitude in the gradients that an optimizer would use, NaN if there is one; without touching any.

        To read `parameter.grad` makes a Python object of each, which costs more than to look at a small one.

        Returns:
            0 where there are none; None where they have to be taken one by one, with `largest_each`: not all of one type,
            not all plain tensors in the host's memory, or calls are not entered in C.
        """
        groups = [group["params"] for group in groups_of(optimizer)]
        parameters = groups[0] if len(groups) == 1 else [one for group in groups for one in group]
        return self._host.numeric.at_once(parameters, True) if type(parameters) is list else None

    def is_readable(self, tensor: Tensor) -> bool:
        """Whether torch's operations can read the elements of a tensor of the training. Ask before a plugin uses one.

        They end the process on a tensor whose memory is not there: freed by an offloading engine, or a parameter whose
        class keeps its numbers elsewhere. The five methods above ask by themselves.

        Returns:
            False also for an empty tensor, and for sparse, nested and other kinds that are not one block of torch's own.
        """
        return self._host.numeric.is_readable(tensor)

    def number(self, tensor: Tensor) -> float | None:
        """Return the only element of a real tensor in the host's memory, such as a loss; None of any other: use `later`."""
        return self._host.numeric.number(tensor)

    def later(self, values: Sequence[Tensor], then: Numbers) -> None:
        """Read small tensors without waiting for their device: `then` is called with all their elements in one list.

        That is after a later step, in the training thread; for tensors in the host's memory after this step. The
        requests of a step, all plugins' together, cost one copy. Of a plugin that was unloaded or quarantined
        meanwhile nothing is called.

        Args:
            values: of one device and of any real type; their numbers arrive as float64.
            then: must not keep the training waiting, like a hook; what it raises is counted as the plugin's error.
        """
        self._host.numeric.ask(self, values, then)

    # -- where the training stands

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

        All ranks begin the same ones in the same order: the same number means the same step in each, whatever they call it.
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
        """Give the modules that this thread is inside of, the outermost first."""
        return self._host.module_stack()

    def returned(self) -> Sequence[Returned]:
        """Give what the module calls inside this thread's outermost call have returned, in the order of returning.

        At every step, sampled or not, for a plugin whose `remembers` is true. Inside of the outermost call all of them, as
        far as their outputs live: small ones are kept for that. Afterwards, until the next one, the last 32.
        """
        return self._host.returned_now()

    def roots(self) -> list[Module]:
        """Give the roots of all models seen, in the order in which they were first called."""
        return self._host.model_roots()

    def models(self) -> list[tuple[Module, nn.Module]]:
        """Give each root with the module that the training calls: a DistributedDataParallel around it, which it leaves out.

        Never keep them.
        """
        return self._host.outermost_modules()

    def module_states(self) -> list[tuple[Module, str]]:
        """Give every module of all models seen, with what is seen of it, parents first.

        `observed`; `compiled` and `scripted` (their calls are not seen); `never_called` since the attach, though its
        model was trained a step; `bypassed`, when such a module's parameters get gradients all the same: somebody calls
        `.forward()` or uses the parameters in a function. Empty for what has no `forward` of its own (ModuleList), and
        where no plugin listens.
        """
        return self._host.module_states()

    def ordered_parameters(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
        """Give the parameters that `optimizer` holds, in the models' order, with their names.

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
        """Have sampled hooks called once in so many steps from now on, whatever they cost; None: as often as before.

        For what has found something and must look closely until it knows more. At once, from any hook: of a module
        call that is under way, what has not returned yet is seen.

        Args:
            interval: in steps.
            hooks: which ones; all where none is named.
        """
        held = {hook: steps for hook, steps in self._held.items() if hook not in hooks} if hooks else {}
        if interval is not None:
            held.update(dict.fromkeys(hooks or ("",), interval))
        if held != self._held:
            self._held = held
            self._host.resample()

    def has_seen_all(self) -> bool:
        """Return whether hookd itself has looked at all that observed modules have returned so far in this thread's outermost call.

        For a plugin that listens to `suspect`, in its hooks on calls: what it was not told of was finite, or -inf. Not of what
        calls have returned that are made again by activation checkpointing.
        """
        return self._host.has_seen_all(self.plugin)

    def listen(self, hook: str, *, wanted: bool) -> None:
        """Have one of the plugin's hooks called, or not, from its next event on; from any hook, as often as one likes.

        A hook of every step costs up to 0.1 ms also where it does nothing: what it works with has left the processor's
        cache since the last step. For one that seldom has anything to do, when another one knows that.
        """
        if wanted == (hook in self._unwanted):
            (self._unwanted.discard if wanted else self._unwanted.add)(hook)
            self._host.resample()

    def is_wanted(self, hook: str) -> bool:
        """Whether a hook is to be called as far as the plugin has said."""
        return hook not in self._unwanted

    def fix(self, hooks: Sequence[str], interval: int) -> None:
        """Keep some sampled hooks, or all where none is named, at an interval that the person asked for."""
        self._fixed.update(dict.fromkeys(hooks or ("",), interval))

    @property
    def is_fixed(self) -> bool:
        """Whether the interval of some hook does not depend on the budget."""
        return bool(self._held or self._fixed)

    def fixed(self, hook: str) -> int | None:
        """Give the interval that does not depend on the budget, by `hold` or by the person; None: the governor's."""
        found = (by.get(hook, by.get("")) for by in (self._held, self._fixed))
        return next((interval for interval in found if interval is not None), None)
