"""List the modules that hookd cannot observe, and the mode, hooks and elements of each module.

    hookd_coverage_unseen{module,state}            1 for each module that is not observed: compiled and scripted (only
                                                   the outermost), bypassed, never_called; and transformed
    hookd_coverage_mode_switches_total{module,mode}  calls of `train()` and `eval()` on the module itself
    hookd_coverage_training{module}                1 if the module was in training mode at its last call in a sampled
                                                   step: one in `every`
    hookd_coverage_hooks{module,kind,function}     hooks on the module that are not hookd's: of the training code,
                                                   accelerate, FSDP, peft...; `kind` is such as forward_pre, `function`
                                                   is its origin, `module:name`
    hookd_coverage_elements{module,kind}           elements of the module's own tensors: parameter, frozen, buffer, and
                                                   transient for buffers that are not in the state_dict

`never_called`: not called since the attach, although the model was trained for a step. `bypassed`: never called, but
its parameters get gradients, because code calls its `forward` directly or uses its weights in a function. torch itself
does so in MultiheadAttention (`out_proj`). A module that is bypassed only sometimes counts as observed; its timings and
statistics then only cover its calls.

`transformed`: in a sampled step, the module was called under a transform of `torch.func` (vmap, grad, jvp). Such a call
is counted and timed, but its tensors are stand-ins for others, so no plugin reads them.

Not detected:
- a module without parameters whose `forward` is called directly: it counts as never called;
- a class with its own `__call__` that does not call torch's;
- calls inside a compiled, scripted or exported module, which is a single call for hookd;
- modules that were never part of a model that was called, such as those only used under `torch.func` before the attach.

The hooks and elements of `modules` modules are read in each sampled step, in a cycle: with the defaults, a model of
1,000 modules takes 160 steps. The list of unseen modules is made when a cycle begins.

Options: `every=N`, `modules=N` (64), `hooks=N` (200: most series of hooks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd import Context, Module, Plugin, hookimpl, hooks_on, peek
from hookd_coverage.shown import Shown
from hookd_coverage.state import elements, is_transformed

if TYPE_CHECKING:
    from collections.abc import Iterator

UNSEEN = ("compiled", "scripted", "bypassed", "never_called")
INSIDE = ("compiled", "scripted")
"""States that a module shares with all modules inside it."""


class Coverage(Plugin):
    """Lists modules that are not observed, and each module's mode, hooks and elements."""

    name = "coverage"
    sampled = ("forward_pre", "step_done")
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.portion = context.option("modules", 64, least=1)
        most_hooks = context.option("hooks", 200, least=0)
        self.unseen = Shown(context.gauge("unseen", "1 for a module that is not observed.", ["module", "state"]))
        self.switches = context.counter("mode_switches", "Calls of train() and eval().", ["module", "mode"])
        self.training = context.gauge("training", "1 for a module that was last called in training mode.", ["module"])
        self.hooks = Shown(
            context.gauge("hooks", "Hooks on the module that are not hookd's.", ["module", "kind", "function"]),
            most_hooks,
        )
        self.elements = Shown(
            context.gauge("elements", "Elements of the module's own parameters and buffers.", ["module", "kind"])
        )
        self.logged: set[str] = set()
        self.transformed: set[str] = set()  # since the last cycle began
        self.tour: Iterator[Module] = iter(())

    @hookimpl
    def mode(self, module: Module, training: bool) -> None:
        """Count a switch of the mode."""
        self.switches.labels(module.name, "train" if training else "eval").inc()

    @hookimpl
    def forward_pre(self, module: Module) -> None:
        """Note the mode in which the module is called."""
        if is_transformed():
            self.transformed.add(module.name)
        training = peek(module.torch(), "training")
        if isinstance(training, bool):
            self.training.labels(module.name).set(training)

    @hookimpl
    def step_done(self) -> None:
        """Read the next modules; after the last one, the states of all."""
        for _ in range(self.portion):
            module = next(self.tour, None)
            if module is None:
                self._begin()
                return
            torch_module = module.torch()
            if torch_module is not None:
                of_hooks, of_elements = hooks_on(torch_module), elements(torch_module)
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
        self._log(sorted(name for name, state in unseen if state == "bypassed" and name not in self.logged))
        self.tour = iter([module for module, _ in states])

    def _log(self, bypassed: list[str]) -> None:
        if bypassed:
            self.logged.update(bypassed)
            names = ", ".join(bypassed)
            self.context.log(
                f"not observed: {names}: trained, but never called (.forward(), or weights used in a function)"
            )
