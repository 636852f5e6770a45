"""Find the origin of the first NaN or infinity: its module, place and step.

    hookd_nan_nonfinite_total{module,where,kind}   tensors seen with a NaN (kind nan) or else an infinity (inf)
    hookd_nan_origin{module,where,kind}            1 for the place where the first one originated; if it may be one of
                                                   several places, the share of each; 0 where it was only seen
    hookd_nan_first_step                           the step of that origin
    hookd_nan_amp_skipped_steps_total              steps that a GradScaler skipped because the gradients overflowed

How often it checks. Every step has a *gate*: the output of the model, the loss, and the gradients that an optimizer is
about to use. The plugin checks the gate in every step, with one exception: it checks the gradients less often, at least
in one step of ten, if the budget allows no more and nothing is suspicious, that is, no GradScaler, closure or policy
needs them, and nothing bad is known. Then it reads the small ones after every backward, and all of them before they
are used if one of these is bad. A gradient that goes bad unseen is found where the parameters that it made bad are
used next, and the incident says so (`gradients: unknown`).
C code checks the outputs of modules in every step if they are small and in host memory (the hook `suspect`). Larger
outputs (also in C), outputs on a device, and all outputs where C does not enter the calls are checked as often as the
budget allows, at least in one step of ten; the metric `hookd_sampling_interval_steps` has the interval. The gradients
between modules cost several times as much, and are checked at least in one step of a thousand: the gate sees that a
gradient is bad, and these checks tell which module made it. After a hit of the gate, every module and every gradient is
checked until the origin is known, or until nothing bad has been seen for 100 steps. Once it is known, one step in 50 is
checked, and the loss of every step.
An incident says `exact` or `born since step X`. X is the first step in which that place was not checked. For a
parameter, X is the step whose optimizer may have made it bad: parameters are only checked when an output is bad. With
`every=1` the outputs of all modules are checked in every step, whatever that costs; with `every=N` in one step of N.
The gradients between modules are left to the budget all the same.

How the origin is found. If the output of a module call is bad, and its inputs and its own parameters are good, that
module is the origin. This can be a container too: its own code or a hook made the value. If one of its own parameters
is bad, that parameter is named. So is a bad parameter of a module inside it, which its code may have used without a call
(as `MultiheadAttention` uses `out_proj`). A buffer is named only if the inputs are good and the module is not in
training mode, because in training the call may have written the buffer itself.
If the inputs were bad already, the caller of the module decides when it returns; at the outermost call, the input of the
model is the origin. A module that changed its inputs in place is named, and the incident says that they are unknown. In
a backward, the first bad gradient in the order of execution is the origin. A bad loss after good outputs has no module.
Consequences of the origin are counted, but not reported again. After 100 steps in which nothing was bad, the next bad
value is reported as a new case, with at most 8 cases in a run.
If only the gate has seen a bad value, in a step in which the modules were not checked, a bad input, a bad parameter and
a bad loss are known at once. A bad output of the model is traced back through its calls, as far as their inputs and
outputs still exist. The first bad output is named, or, if its input was bad, the module whose code made the call;
`or_in` lists earlier modules whose outputs are gone. Of bad gradients, the parameter is named whose gradient came first,
which is the last one in the model's order; `or_in` lists the modules after it in whose backward the value may have been born.
A second incident names the module when it makes another bad value. This never happens if an optimizer has used the bad
gradients in the meantime: then all parameters are bad, and the first incident is all that is known.

GradScaler. It lets gradients overflow on purpose, so a bad gradient is only a suspect until its fate is known. It is an
origin if an optimizer step is about to use it. It is a skipped step if a fused optimizer is given `found_inf`, or if the
gradients are cleared before a step uses them. After `amp_patience` skipped steps in a row it is reported after all,
because no scale is that large. (Code that discards bad gradients by itself looks the same, and is treated the same.) All
of this applies to each optimizer separately.

Contents of an incident. It has the numbers of the last `recorder` module calls (20) whose modules were checked, if their
outputs still exist (for calls that were found finite at once: of the last 32); the loss, the largest gradient and the
learning rate of the last steps; the stacks of modules and of Python; and exact counts of the tensor.

Policies. `policy` says what is done in addition to the report. Every policy but `report` changes the training, and is
counted in `hookd_nan_policy_total{policy}`.
- `raise` raises `FloatingPointError` in the training code, once per reported case.
- `pause` stops the training where it is, once per case, until `policy=report` is configured or the agent leaves. Other
  ranks wait for this one at their next collective.
- `skip` sets `.grad = None` before each optimizer step whose gradients are bad. They are reduced by then, so all ranks
  decide the same. It refuses if each rank has only a part of the gradients (FSDP). Gradients that a closure makes are
  removed when the closure returns; it refuses LBFGS, which calls its closure several times. On a device it waits for the
  gradients, as GradScaler does.
New options (`hookd plugin config`) keep all that is known.

`-inf`. A tensor with `-inf`, and no NaN or `+inf`, in outputs, inputs or parameters is good unless `neginf=true`,
because attention masks use it. So if a module makes a `-inf` that is not a mask (log of 0), the origin is the first
module with a NaN or `+inf`, or the loss. The incident then has `neginf_in`: it says that the inputs had a `-inf`, or for
a loss names the first module whose output has one, if that output still exists. (It does not if the criterion is a
module.)

Containers. The plugin checks tensors inside tuples, lists, dicts, deques, dataclasses and namespaces, down to 8 levels
and up to 64 tensors. If a module was given or returned more than that, or an object of another type, an incident does
not say `exact`: it has `inputs=partly`, or lists the module in `or_in`.

Limits. In the first steps after an attach, a module that is not observed yet is reported as the module that called it: a
deep model is learned over several steps, parents first. The output of a module on a GPU is known one or two steps later,
with its exact step; without steps, the results of 32 calls are read together. Checks whose results cannot be read from it are not
judged, and listed in `unread` where one of them may be the origin. On a GPU, a parameter that goes bad between two
checks of the modules is seen as the output of its model, and bad outputs are not traced back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd import Context, Module, Plugin, Rate, hookimpl
from hookd_nan.blame import Blame
from hookd_nan.findings import Checks, Findings
from hookd_nan.forward import Outputs
from hookd_nan.gradients import Gradients
from hookd_nan.inferred_finite import InferredFinite
from hookd_nan.judge import Judge
from hookd_nan.optimizers import Optimizers
from hookd_nan.pending import Queue
from hookd_nan.policy import POLICIES, Policy
from hookd_nan.recorder import Recorder
from hookd_nan.scan import Scan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

    from hookd import Call

__all__ = ["NaN"]

STATE = {
    "checks": ("outputs", "backwards", "gates", "used", "order"),
    "scan": ("is_strict",),
    "inferred": ("good",),
    "outputs": ("judged_whole", "unseen", "is_inside", "traced"),
    "gradients": ("undecided", "is_scaled", "was_scaled", "has_closure", "reached", "stepping"),
    "optimizers": ("known", "holders", "last"),
    "recorder": ("steps", "last_loss", "loss_step"),
    "findings": ("case", "unread", "unread_count"),
}
"""What a plugin with new options takes over: attributes of its parts."""


class NaN(Plugin):
    """Checks every output, gradient and loss, and names the first that is not finite."""

    name = "nan"
    sampled: Mapping[str, Rate] = {
        "forwards": Rate(),
        "backward_pre": Rate(longest=1000, unless_finite=True),
        "backward": Rate(longest=1000, unless_finite=True),
        "step_pre": Rate(stretched_last=True),
        "closure_done": Rate(stretched_last=True),
    }
    every = 1
    longest = 10
    remembers = True
    mutating = ("step_pre", "closure_done")  # with a policy other than report

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options, and make the parts."""
        self.context = context
        scan = self.scan = Scan(context, neginf=context.option("neginf", default=False))
        patience = context.option("amp_patience", 30, least=1)
        judge, checks = self.judge, self.checks = Judge(patience), Checks(context)
        recorder = self.recorder = Recorder(context)
        policy = self.policy = Policy(context, context.option("policy", "report", POLICIES))
        self.mutates = policy.name != "report"
        optimizers = self.optimizers = Optimizers(context)
        blame = Blame(context, scan, optimizers)
        findings = self.findings = Findings(context, scan, checks, blame, recorder, policy)
        queue = self.queue = Queue(context, findings.note_unread)
        self.inferred = InferredFinite(context.per_module())
        shared = context, scan, checks, judge, queue, findings, blame, recorder
        self.outputs = Outputs(*shared, self.inferred)
        self.gradients = Gradients(*shared, optimizers, policy)

    @hookimpl
    def succeed(self, predecessor: NaN) -> None:
        """Take over the state of a predecessor with other options, so that its first NaN is not reported twice."""
        for part, names in STATE.items():
            for name in names:
                setattr(getattr(self, part), name, getattr(getattr(predecessor, part), name))
        # The judge itself is shared: the predecessor may still have events to judge.
        predecessor.judge.patience = self.judge.patience
        self.judge = self.outputs.judge = self.gradients.judge = predecessor.judge
        self.recorder.seen.extend(predecessor.recorder.seen)
        self.queue.succeed(predecessor.queue)
        metrics = {metric.name: metric for metric in self.context.metrics}
        for metric in predecessor.context.metrics:
            if metric.name in metrics:
                metrics[metric.name].adopt(metric)
        self.findings.hold()

    @hookimpl
    def select(self, module: Module) -> set[str]:
        """Select every module.

        Gradients that leave a container are seen when they leave the first module in it, which costs less.
        """
        self.inferred.learn(module)
        hooks = {"root_forward", "forward_error", "forwards", "backward_pre", "backward"}
        if not self.scan.neginf:
            hooks.add("suspect")
        return hooks if module.leaf else hooks - {"backward"}

    @hookimpl
    def forwards(self, calls: Sequence[Call]) -> None:
        """Check the outputs of a portion."""
        self.outputs.forwards(calls)

    @hookimpl
    def suspect(self, call: Call) -> None:
        """Check a call that C found bad."""
        self.outputs.suspect(call)

    @hookimpl
    def root_forward(
        self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any, versions: tuple[int, ...]
    ) -> None:
        """Act on what was found late, and check the output of a model."""
        self.policy.act()
        self.outputs.root_forward(module, inputs, kwargs, output, versions)
        self.queue.call_done()

    @hookimpl
    def forward_error(self, module: Module) -> None:
        """Forget the calls that will not return."""
        self.outputs.forward_error(module)

    @hookimpl
    def backward_pre(self, module: Module, grad_output: tuple[Any, ...]) -> None:
        """Record the order in which gradients reach the modules; check those that reach a container."""
        self.gradients.backward_pre(module, grad_output)

    @hookimpl
    def backward(self, module: Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
        """Check the gradient that leaves the module."""
        self.gradients.backward(module, grad_input, grad_output)

    @hookimpl
    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Check the loss, and find out what became of the gradients of the previous backward."""
        self.gradients.loss(tensors)

    @hookimpl
    def loss_done(self) -> None:
        """Check the parameters' gradients if a GradScaler may skip the optimizer step; `loss` enables this hook."""
        self.gradients.loss_done()

    @hookimpl
    def step_pre(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Check the gradients that are about to be used."""
        self.gradients.step_pre(optimizer, has_closure)

    @hookimpl
    def closure_done(self, optimizer: Optimizer) -> None:
        """Check the gradients that a closure has made inside the optimizer's step."""
        self.gradients.closure_done(optimizer)

    @hookimpl
    def step_post(self) -> None:
        """End the step: request the values on devices, and judge those that have arrived."""
        self.gradients.step_post()
        self.findings.step_done()
        # Once the origin is known, everything after it is bad, and sampled steps are enough.
        for hook in ("suspect", "backward_pre", "backward"):
            self.context.listen(hook, wanted=not self.findings.is_over)
        self.queue.flush()
