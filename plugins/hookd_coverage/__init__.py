"""What hookd does not see, and what the training code does to its modules. Runs in the target.

    hookd_coverage_unseen{module,state}            1 for each module that is not observed: compiled and scripted (of these
                                                   the outermost), bypassed, never_called; and transformed
    hookd_coverage_mode_switches_total{module,mode}  calls of `train()` and `eval()`, by the module that they were made on
    hookd_coverage_training{module}                whether the module was in training mode at its last call in a sampled
                                                   step: one in `every`
    hookd_coverage_hooks{module,kind,function}     hooks of others on the module: those of the training code, of
                                                   accelerate, FSDP, peft...; `kind` as in forward_pre, `function` is
                                                   where it is from, `module:name`
    hookd_coverage_elements{module,kind}           elements that the module itself holds: parameter, frozen, buffer, and
                                                   transient for buffers that no state_dict has

`never_called`: not since the attach, though the model was trained a step. `bypassed`: never called, but its parameters
get gradients: somebody calls its `forward` directly or uses its weights in a function. torch does so itself in
MultiheadAttention (`out_proj`). What is bypassed only now and then counts as observed, and so the timings and statistics
of such a module hold for its calls alone.

`transformed`: in a sampled step it was called under a transform of `torch.func` (vmap, grad, jvp). Such a call is counted and
timed, but its tensors stand for others, so nobody looks at them.

Not seen by anybody here, and not told:
- a module without parameters whose `forward` is called directly: it counts as never called;
- a class with a `__call__` of its own that does not call torch's;
- what happens inside a compiled, scripted or exported module: one call of the whole is all there is;
- modules that were never part of a call's model, such as those only used under `torch.func` before the attach.

The tour of hooks and elements takes `modules` modules at each sampled step, and begins anew when it is through: at the
defaults a model of 1,000 modules is seen in 160 steps. The list of what is unseen is made at its beginning.

Options: `every=N`, `modules=N` (64), `hooks=N` (200: series of hooks at most).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd import Context, Module, Plugin, PluginError, hookimpl, hooks_on, peek
from hookd_coverage.shown import Shown
from hookd_coverage.state import elements, is_transformed

if TYPE_CHECKING:
    from collections.abc import Iterator

UNSEEN = ("compiled", "scripted", "bypassed", "never_called")
INSIDE = ("compiled", "scripted")
"""States that all have that are inside of one that has them."""


class Coverage(Plugin):
    """Lists what is not seen, and each module's mode, hooks and state."""

    name = "coverage"
    sampled = ("forward_pre", "step_done")
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.portion = context.option("modules", 64)
        most_hooks = context.option("hooks", 200)
        if self.portion < 1 or most_hooks < 0:
            raise PluginError("coverage: modules must be 1 or more, and hooks 0 or more")
        self.unseen = Shown(context.gauge("unseen", "1 for a module that is not observed.", ["module", "state"]))
        self.switches = context.counter("mode_switches", "Calls of train() and eval().", ["module", "mode"])
        self.training = context.gauge("training", "1 for a module that was last called in training mode.", ["module"])
        self.hooks = Shown(
            context.gauge("hooks", "Hooks of others on the module.", ["module", "kind", "function"]), most_hooks
        )
        self.elements = Shown(context.gauge("elements", "Elements that the module itself holds.", ["module", "kind"]))
        self.told: set[str] = set()
        self.transformed: set[str] = set()  # since the last tour began
        self.tour: Iterator[Module] = iter(())

    @hookimpl
    def mode(self, module: Module, training: bool) -> None:
        """Count a switch."""
        self.switches.labels(module.name, "train" if training else "eval").inc()

    @hookimpl
    def forward_pre(self, module: Module) -> None:
        """Note the mode that the module is called in."""
        if is_transformed():
            self.transformed.add(module.name)
        training = peek(module.torch(), "training")
        if isinstance(training, bool):
            self.training.labels(module.name).set(training)

    @hookimpl
    def step_done(self) -> None:
        """Look at the next modules; where there is none, at the states of all."""
        for _ in range(self.portion):
            module = next(self.tour, None)
            if module is None:
                self._begin()
                return
            held = module.torch()
            if held is not None:
                of_hooks, of_elements = hooks_on(held), elements(held)
                self.hooks.show(module.name, {(module.name, *labels): count for labels, count in of_hooks.items()})
                self.elements.show(module.name, {(module.name, kind): size for kind, size in of_elements.items()})

    def _begin(self) -> None:
        states = self.context.module_states()
        by_number = {module.id: state for module, state in states}
        unseen: dict[tuple[str, ...], float] = {}
        for module, state in states:
            is_inside = state in INSIDE and module.parent is not None and by_number.get(module.parent.id) == state
            if state in UNSEEN and not is_inside:
                unseen[module.name, state] = 1
        unseen |= {(name, "transformed"): 1 for name in self.transformed}
        self.transformed.clear()
        self.unseen.show("", unseen)
        self._tell(sorted(name for name, state in unseen if state == "bypassed" and name not in self.told))
        self.tour = iter([module for module, _ in states])

    def _tell(self, bypassed: list[str]) -> None:
        if bypassed:
            self.told.update(bypassed)
            names = ", ".join(bypassed)
            self.context.log(f"not seen: {names}: gradients but no calls (.forward(), or weights used in a function)")
