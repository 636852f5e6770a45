"""Where the first NaN or infinity was born: module, place and step. Runs in the target.

    hookd_nan_nonfinite_total{module,where,kind}   tensors seen with a NaN (kind nan) or else an infinity (inf)
    hookd_nan_origin{module,where,kind}            1 for the place where the first one was born; where it may be one of
                                                   several, each one's share; 0 where it was only seen
    hookd_nan_first_step                           the step in which that was
    hookd_nan_amp_skipped_steps_total              steps that a GradScaler skipped because the gradients overflowed

How often it looks. At every step there is a *gate*: what a model gives back, the loss, and the gradients that an
optimizer is about to use. Those gradients alone are looked at less often, at least one step in ten, where the budget allows no more
and nothing is suspicious: no GradScaler, closure, bundle or policy needs them, and nothing bad is known. A gradient that went bad unseen
is found where the parameters that it has made bad are used next, and the incident says so (`gradients: unknown`). At every step, too,
is what modules return, in C, where that is small and in the host's memory (the hook `suspect`).
Larger outputs, also in C, those on a device, and all where calls are not entered in C are looked at as often as the budget allows, at least
one step in ten (the metric `hookd_sampling_interval_steps` says which), and the gradients that flow between them, which cost several times as much,
at least one step in a thousand: that a gradient is bad the gate sees, this says which module made it. After a
hit of the gate every module and every gradient is looked at, until the origin is known or has not come again for 100
steps. An incident says `exact`, or `born since step X`: X is the first step in which that place was not looked at; of a
parameter it is the step whose optimizer may have made it so: parameters are looked at where an output is bad. With
`every=1` the outputs of all modules are looked at in every step, whatever that costs; `every=N` in one step of N. The
gradients between modules are left to the budget all the same.

How the origin is found. A module call whose output is bad, though its inputs and its own parameters are not, made the
bad value itself: a container too, whose own code or hook did it. If one of its own parameters is bad, or one of a module
inside of it, which its code may have used without a call (as `MultiheadAttention` does with `out_proj`), that is named;
a buffer only if the inputs are good and the module is not in training, where the call itself may have written it.
If its inputs were bad already, the module that called it decides when it returns, and at the outermost call the input
of the model is to blame. A module that changed its inputs in place is named with the remark that they are unknown. In
a backward, the first bad gradient in the order of execution is the origin; a bad loss after good outputs has no module.
What follows from the origin is counted, but not reported again; after 100 steps in which nothing was bad, the next one
is reported as another, 8 in a run at most. Where the gate alone has seen it, in a step in which
the modules were not looked at, a bad input, a bad parameter and a bad loss are known at once. A bad output of the model
is traced back through the calls in it, as far as their inputs and outputs still live: the first bad output is named, or
if its input was bad, the module whose code called it; and the modules before it whose outputs are gone (`or_in`). Of bad
gradients, the parameter whose gradient came first is named.
A second incident names the module when it makes another one. It never does if an optimizer has used the bad gradients
in the meantime: then all parameters are bad, and nothing is known but the first incident.

Gradients under a GradScaler overflow on purpose. So a bad gradient is only a suspect until it is known what became of
it: an optimizer step about to use it makes it an origin; a fused optimizer told of `found_inf`, or gradients that were
cleared before any step used them, make it a skipped step. After `amp_patience` skipped steps in a row it is reported
after all: no scale is that large. (Code that throws bad gradients away by itself looks the same, and is treated so.)
All of that goes for each optimizer by itself.

An incident has the numbers of the last `recorder` module calls (20) whose modules were looked at, as far as their
outputs are still alive (of those that were found finite at once, of the last 32), and loss, largest gradient and learning rate of the last steps; the stacks of modules and of
Python; and exact counts of the tensor.

What is done about it, beside telling of it, says `policy`; all but `report` change training and count in
`hookd_nan_policy_total{policy}`. `raise` raises `FloatingPointError` in the training code, once for each that is
reported. `pause` stops the training where it is, as often, until `policy=report` is configured or the agent leaves;
other ranks wait for this one at their next collective. `skip` sets `.grad = None` before each optimizer step whose
gradients are bad: they are reduced by then, so all ranks decide the same; where each rank holds a part of them (FSDP)
it refuses. Those that a closure makes are taken when it returns; with LBFGS, which calls it several times, it refuses.
On a device it waits for the gradients, as GradScaler does. New options (`hookd plugin config`) take over all that is
known.

With `capture=true` an incident comes with a *repro bundle* (docs/nan.md): `hookd replay BUNDLE` makes the call again in a
fresh process. It carries the module of the origin; where the gate alone has seen it, or a backward that was looked at,
the whole model, and the replay tells the module. It is copied at the moment and written by a thread of hookd's, below
`capture_dir` (a place for a program's state or for temporary files), for the owner alone. The incident has the path as
`bundle`, or in `no_bundle` why there is none: above `capture_bytes` (256 MiB) nothing is written, and what was on a
device is gone by then. Another one (`bundle`, `bundle_failed`) says what became of it. What a model was called with is
kept until the end of the step for that, and the state of the random numbers is read when a module begins.

`-inf` alone in outputs, inputs and parameters is no finding unless `neginf=true`: attention masks are made of it. So a
module that makes a `-inf` which is none (log of 0) is not the origin of what comes of it: that is the first module with
a NaN or `+inf`, or the loss. What is told of it says so (`neginf_in`): that the inputs had a `-inf`, or for a loss the
first module whose output has one, if that still lives. With a criterion that is a module it does not.

Looked into are tuples, lists, dicts, deques, dataclasses and namespaces, 8 deep and for 64 tensors. Where a module was
given more, or an object of another type, or returned it, an incident does not say `exact`: `inputs=partly`, or the
module is in `or_in`.

Limits: in the first steps after an attach, a module that is not observed yet is reported as the module that called it:
a deep model is learnt over some steps, parents first. What a module on a GPU made is known a step or two later, with
its exact step; there, a parameter that goes bad between two looks at the modules is seen as its model's output, and no
bad output is traced back.
"""

from __future__ import annotations

from hookd import Module, hookimpl
from hookd_nan.backward import Backward
from hookd_nan.forward import Forward

__all__ = ["NaN"]


class NaN(Forward, Backward):
    """Looks at every output, every gradient that flows and every loss, and names the first that is not finite."""

    name = "nan"
    sampled = ("forward_pre", "forward", "forwards", "backward_pre", "backward", "step_pre", "closure_done")
    every = 1
    longest = 10
    rare = ("backward_pre", "backward")
    rarest = 1000
    sampled_last = ("step_pre", "closure_done")
    unless_finite = ("backward_pre", "backward")
    remembers = True
    fixed_by_every = ("forward_pre", "forward", "forwards")
    mutating = ("step_pre", "closure_done")  # with a policy other than report

    @hookimpl
    def select(self, module: Module) -> set[str]:
        """Want every module; what leaves a container is seen when it leaves the first module in it, at less cost."""
        hooks = {"root_forward", "forward_error", "backward_pre", "backward"}
        if self.captures:
            self.capture.learn(module)
            hooks |= {"forward", "forward_pre" if module.depth else "root_forward_pre"}
        else:
            self.implied.learn(module)
            hooks |= {"forwards", "suspect"} if self.masks else {"forwards"}
        return hooks if module.leaf else hooks - {"backward"}

    @hookimpl
    def unconfigure(self) -> None:
        """Keep nothing of the training's."""
        self.capture.let_go()
