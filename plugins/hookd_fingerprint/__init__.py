"""Record digests of what each step computes, so that `hookd diff` can tell where two runs part.

In each sampled step, in the order in which things happen:

    random       the states of the random number generators of torch, CUDA, Python and numpy, before the first call of a model
    data         what a model is called with
    forward      what goes into each module, and what comes out
    loss         what the backward begins with
    backward     with `backward=true`: the gradients that reach the outputs of each module, and those that leave it for its inputs
    weights      each parameter before the optimizer's step, if it has been written since the last one, or that was not sampled;
                 then also the parameters that no optimizer has
    gradients    each parameter's gradient, as the optimizer uses it
    state        the optimizer's own tensors, in the first step that is recorded
    update       each parameter after the optimizer's step
    buffers      each buffer at the end of the step

and the settings of the optimizers. Of each tensor there are a digest of its bits, its L2 norm, its least and greatest finite
element, and how many are not finite. They are sent to the tool that asked for them, `hookd fingerprint`, which writes the file;
while no tool reads, nothing is computed. The tool drops a first step that lacks what the second has: the attach was in the middle of it.

    hookd_fingerprint_steps_total     steps recorded
    hookd_fingerprint_lost_total      steps that were not: the tool was too slow, or they have millions of calls
    hookd_fingerprint_last_step       the last step that was recorded

Options: `every=N`, the same steps on all ranks of a job; `modules=GLOB|GLOB` (names), `forward=false`, `backward=true` (a hook in the graph for each call, which costs several
times as much as the rest), `gradients=false`, `update=false` (with the buffers), `buffer=N` (MiB of records that are kept until the first tool reads, which `hookd run --fingerprint` needs for the first steps).

The digests of tensors on a device are computed there and arrive a step later: a record is sent once all of its have arrived, or are lost.

Limits: calls that no backward follows are left out, as are those that checkpointing repeats, and sparse or nested tensors, which are
counted. A tensor that is changed through `.data` between two calls or steps counts as unchanged.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookd import (
    Context,
    Module,
    Plugin,
    buffers_of,
    groups_of,
    hookimpl,
    modules_in,
    name_within,
    of_tensor,
    parameters_in,
    peek,
    tensors,
)
from hookd_fingerprint.entries import Entries, Place
from hookd_fingerprint.random_states import random_states
from hookd_fingerprint.records import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from hookd_fingerprint.records import Record

__all__ = ["Fingerprint"]

KNOWN_STEPS = 10
"""Number of recorded steps after which the modules are known."""
MOST_WAITING = 8
"""Number of steps that may wait for numbers of a device."""


class Fingerprint(Plugin):
    """Sends the digests of each sampled step to the tool that reads them."""

    name = "fingerprint"
    sampled = ("forward_pre", "forward", "loss", "backward_pre", "backward", "step_pre", "step_post")

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.selected = context.globs("modules")
        self.has_forward = context.option("forward", default=True)
        self.has_backward = context.option("backward", default=False)
        self.has_gradients = context.option("gradients", default=True)
        self.has_update = context.option("update", default=True)
        self.steps = context.counter("steps", "Steps recorded.").labels()
        self.lost = context.counter("lost", "Steps that were not recorded, since the tool was too slow.").labels()
        self.last = context.gauge("last_step", "The last step that was recorded.").labels()
        self.every = context.option("every", 1, least=1)
        self.mark = 0  # of the step before
        self.entries = Entries(context, self._send_complete)
        self.room = context.option("buffer", 0, least=0, most=1024) << 20  # what is left of it
        self.kept: deque[bytes] = deque()  # records for the first tool
        self.waiting: deque[Record] = deque()  # records of steps that are over, in their order
        self.settings: list[dict[str, object]] = []
        self.reader = 0
        self.before = self.sent = -1  # the last step that was recorded in this stream, and the last that was sent
        self.versions: dict[str, int] = {}  # torch's counts of changes of the parameters, after the optimizer's step
        self.ordered: dict[int, list[tuple[str, Parameter]]] = {}  # of the optimizers that are stepping, by their ids
        self.over = 0  # number of recorded steps
        self.is_open = False  # whether the step in progress is being recorded
        self.models = 0  # those that were looked through for parameters that no optimizer has
        self.has_others = False  # whether there are any

    @hookimpl
    def select(self, module: Module) -> set[str]:
        """Select the roots, and the modules that the options name."""
        if module.depth and not self.selected.match(module.name):
            return set()
        of_forward = {"forward_pre", "forward"} if self.has_forward or not module.depth else set()
        return of_forward | ({"backward_pre", "backward"} if self.has_backward else set())

    def _begins(self) -> bool:
        """Whether events of the step in progress are recorded; if so, and this is its first, begin."""
        if not self._is_wanted():
            return False
        if not self.is_open:
            self.is_open = True
            for kind, state in random_states():
                self.entries.add_state(Place("random", "", 0, kind), state)
        return True

    def _is_wanted(self) -> bool:
        """Whether a tool reads, or the first one is waited for; if it is another tool, begin the stream anew."""
        reader = self.context.reader
        if reader != self.reader:
            if not self.room:  # else the first tool gets the stream from its beginning
                self._end()
                self._forget()
            self.reader = reader
        return bool(reader or self.room)

    @hookimpl
    def forward_pre(self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], inference: bool) -> None:
        """Record what a module is called with."""
        if inference or not self._begins():
            return
        phase = "forward" if module.depth else "data"
        call = self.entries.begin_call(module.name)
        given = [*inputs, *kwargs.values()]
        for at, tensor in enumerate(tensors(given)):
            self.entries.add(Place(phase, module.name, call, f"input {at}"), tensor)

    @hookimpl
    def forward(self, module: Module, output: Any, inference: bool) -> None:
        """Record what a module returns."""
        if inference or not self.is_open or not self.has_forward:
            return
        call = self.entries.call(module.name)
        for at, tensor in enumerate(tensors(output)):
            self.entries.add(Place("forward", module.name, call, f"output {at}"), tensor)

    @hookimpl
    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Record what a backward begins with."""
        if self._begins():
            call = self.entries.begin_call("loss")
            for at, tensor in enumerate(tensors):
                self.entries.add(Place("loss", "", call, f"input {at}"), tensor)

    @hookimpl
    def backward_pre(self, module: Module, grad_output: tuple[Any, ...]) -> None:
        """Record the gradients that reach a module's outputs."""
        self._add_gradients(module, "grad of output", grad_output)

    @hookimpl
    def backward(self, module: Module, grad_input: tuple[Any, ...]) -> None:
        """Record the gradients that leave a module for its inputs."""
        self._add_gradients(module, "grad of input", grad_input)

    def _add_gradients(self, module: Module, slot: str, gradients: tuple[Any, ...]) -> None:
        if self.is_open and self.has_backward:
            call = self.entries.begin_call(f"{slot} {module.name}")
            for at, gradient in enumerate(gradients):
                if gradient is not None:
                    self.entries.add(Place("backward", module.name, call, f"{slot} {at}"), gradient)

    @hookimpl
    def step_pre(self, optimizer: Optimizer) -> None:
        """Record what the optimizer is about to use."""
        if not self._begins():
            return
        parameters = self.ordered[id(optimizer)] = self.context.ordered_parameters(optimizer)
        number = self.entries.begin_call("optimizer")
        kind = type(optimizer).__name__
        for at, group in enumerate(groups_of(optimizer)):
            self.settings.append({"optimizer": kind, "group": at, **_numbers(group)})
        self._add_steps_done(optimizer, kind)
        is_next = self.before == self.context.step - 1
        for name, parameter in parameters if self.has_update else ():
            if not is_next or self.versions.get(name) != of_tensor(parameter, "_version"):
                self.entries.add(Place("weights", name, number, "value"), parameter)
        if self.has_update and number == 0:
            self._add_others(optimizer, is_next=is_next)
        if self.has_gradients:
            for name, parameter in parameters:
                if (grad := of_tensor(parameter, "grad")) is not None:
                    self.entries.add(Place("gradients", name, number, "grad"), grad)
        if self.has_update and self.before < 0:
            states = _states(optimizer)
            for name, parameter in parameters:
                self._add_state(name, number, states.get(id(parameter)))

    def _add_others(self, optimizer: Optimizer, *, is_next: bool) -> None:
        """Record the parameters that no optimizer has and that were written: frozen ones, and those of a teacher."""
        models = self.context.models()
        if is_next and not self.has_others and len(models) == self.models:
            return
        self.models = len(models)
        owned = {
            id(p)
            for one in (optimizer, *self.context.optimizers())
            for group in groups_of(one)
            for p in group["params"]
        }
        for root, model in models:
            for path, parameter in parameters_in(model):
                if id(parameter) in owned:
                    continue
                self.has_others = True
                name, version = name_within(root.name, path), of_tensor(parameter, "_version")
                if not is_next or self.versions.get(name) != version:
                    self.entries.add(Place("weights", name, 0, "value"), parameter)
                    self.versions[name] = version

    def _add_steps_done(self, optimizer: Optimizer, kind: str) -> None:
        """Record how many steps the optimizer itself has counted, which is 0 for one that was made anew or does not count."""
        state = next(iter(_states(optimizer).values()), None)
        steps = state.get("step") if type(state) is dict else None
        row: dict[str, object] = {"optimizer": kind, "steps done": 0.0}
        self.settings.append(row)
        if not isinstance(steps, Tensor):
            row["steps done"] = float(steps) if isinstance(steps, (int, float)) else 0.0
        elif (known := self.context.number(steps)) is not None:
            row["steps done"] = known
        else:
            self.entries.add_number(row, "steps done", steps)

    def _add_state(self, name: str, number: int, state: Any) -> None:
        for key, value in state.items() if type(state) is dict else ():
            for tensor in tensors(value):
                self.entries.add(Place("state", name, number, str(key)), tensor)

    @hookimpl
    def step_post(self, optimizer: Optimizer) -> None:
        """Record what the optimizer has made of the parameters."""
        if self.is_open and self.has_update:
            number = self.entries.call("optimizer")
            for name, parameter in self.ordered.pop(id(optimizer), ()):
                self.entries.add(Place("update", name, number, "value"), parameter)
                self.versions[name] = of_tensor(parameter, "_version")

    @hookimpl
    def step_done(self, step: int) -> None:
        """End the record of the step, and send those whose numbers have arrived."""
        if self._is_wanted() and self.is_open:
            if self.has_update:
                self._add_buffers()
            head = {"is_absolute": self.context.is_step_absolute, "mark": self.context.mark, "settings": self.settings}
            record = self.entries.close(step, head)
            self._report_patterns()
            if record.is_full:
                self.lost.inc()
            else:
                self.waiting.append(record)
                self.before = step
            self._end()
        self._send_complete()
        is_due = self._is_next_due(step)
        if self.every > 1:
            self.context.hold(1 if is_due else None)
        for hook in self.sampled:
            self.context.listen(hook, wanted=is_due and bool(self.context.reader or self.room))

    def _report_patterns(self) -> None:
        """Report, once, the patterns that match no module; those of a large model are named within some steps."""
        self.over += 1
        if self.over == KNOWN_STEPS:
            for text in self.selected.unmatched("module"):
                self.context.incident("option", f"fingerprint: {text}")

    def _is_next_due(self, step: int) -> bool:
        """Whether the next step is recorded. All ranks of a job choose the same steps, although they may count them differently."""
        mark, passed = self.context.mark, self.context.mark - self.mark
        self.mark = mark
        if passed > 0:
            return (mark + passed) % (self.every * passed) < passed
        return step % self.every == 0

    def _send_complete(self) -> None:
        """Send the records that wait for no number, in their order; of too many, also the first, without what it waits for."""
        self._is_wanted()  # by the tool that the records are for
        while self.waiting and (not self.waiting[0].waiting or len(self.waiting) > MOST_WAITING):
            record = self.waiting.popleft()
            if self._send(record.encoded()):
                record.know()
                self.steps.inc()
                self.sent = record.step
                self.last.set(record.step)
            else:
                self.lost.inc()
                self.before = self.sent

    def _send(self, record: bytes) -> bool:
        if self.context.reader:
            self.room = 0
            while self.kept and self.context.send(self.kept[0]):
                self.kept.popleft()
            return not self.kept and self.context.send(record)
        self.room -= len(record)
        if self.room <= 0:  # no tool has come: it is off until one does
            self.kept.clear()
            self.room = 0
            return False
        self.kept.append(record)
        return True

    def _add_buffers(self) -> None:
        for root, model in self.context.models():
            for path, module in modules_in(model):
                for name, buffer in buffers_of(module).items():
                    own_name = name_within(root.name, f"{path}.{name}" if path else name)
                    self.entries.add(Place("buffers", own_name, 0, "value"), buffer)

    def _end(self) -> None:
        self.is_open = False
        self.settings = []
        self.ordered.clear()
        self.entries.clear()

    def _forget(self) -> None:
        """Forget the stream: the next tool knows nothing of it."""
        self.before = self.sent = -1
        self.entries.begin_stream()
        self.waiting.clear()
        self.kept.clear()

    @hookimpl
    def unconfigure(self) -> None:
        """Forget what belongs to the training."""
        self._end()
        self._forget()


def _states(optimizer: Optimizer) -> dict[int, Any]:
    """Return the state of each parameter, by the parameter's id."""
    states = peek(optimizer, "state")
    return {id(of): state for of, state in dict.items(states)} if issubclass(type(states), dict) else {}


def _numbers(group: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of a group: numbers as floats, others as text."""
    found: dict[str, object] = {}
    for name, value in group.items():
        if type(value) in (int, float):
            found[name] = float(value)
        elif type(value) in (bool, str, tuple):
            found[name] = shortened(str(value))
    return found
