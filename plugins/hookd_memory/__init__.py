"""Measure memory (the process, torch's allocators of devices, each module) and detect leaks.

    hookd_memory_resident_bytes{kind}        `anonymous` (the program's own) and `shared` (files, shared memory); once a
                                             second
    hookd_memory_output_bytes{module}        size of the module's outputs, at the last sampled step: one step in `every`
    hookd_memory_forward_bytes{module}       growth of the device's allocator from the module's entry to its exit, at the last
                                             sampled step: outputs, and tensors saved for the backward
    hookd_memory_device_allocated_bytes{device}      at the end of the last sampled step
    hookd_memory_device_reserved_bytes{device}
    hookd_memory_device_peak_bytes{device}           peak of the allocated bytes since the training code last reset it
    hookd_memory_device_retries_total{device}        allocations that had to free the cache first, since the attach
    hookd_memory_device_ooms_total{device}           allocations that failed
    hookd_memory_growth_bytes{place}         per step, over the last two thirds of the observed time; `place` is
                                             `anonymous` or a device. No series until there are enough values

Incidents of the kind `leak`, each once:
- The training code keeps outputs or losses with their graphs: those of `kept` sampled steps in a row are all still
  alive. The incident names the modules. Weak references detect this, so it works on every device.
- A place grows steadily, by at least `growth` bytes and 2 % (see hookd_memory.trend). This detects leaks of other
  objects than tensors too, but not their origin.

A loss that is summed up over steps with its graph (`total += loss`) keeps nodes of the graph alive, but no tensor that
can be watched: only the growth shows it. Outputs that are kept for an epoch on purpose look like a leak meanwhile.

Nothing here waits for a device: the allocator's statistics are kept on the host.

Options: `every=N`, `kept=N` (sampled steps in a row, 16), `growth=BYTES` (64 MiB).
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from hookd import Accelerator, Context, Module, Plugin, accelerator_of, accelerators, hookimpl, of_tensor, tensors
from hookd_memory.places import Allocators, Resident, is_in_use
from hookd_memory.retained import Retained, nbytes
from hookd_memory.trend import Trend

LISTED = 8
"""Modules named in one incident."""


class Memory(Plugin):
    """Measures the memory of the process, of torch's allocators of devices and of each module, and reports leaks."""

    name = "memory"
    sampled = ("forward_pre", "forward", "loss")
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.least_kept = context.option("kept", 16, least=2)
        self.least_growth = context.option("growth", 64 << 20, least=1)
        self.output = context.gauge(
            "output_bytes", "Size of the module's outputs at the last sampled step.", ["module"]
        )
        self.grown = context.gauge(
            "forward_bytes",
            "Growth of the device's allocator during the module's forward, at the last sampled step.",
            ["module"],
        )
        self.growth = context.gauge(
            "growth_bytes", "Growth per step, over the last two thirds of the observed time.", ["place"]
        )
        self.resident = Resident(context)
        self.allocators = Allocators(context)
        self.outputs: dict[int, Any] = context.per_module()
        self.entered: dict[tuple[int, int], tuple[Accelerator, Any, int]] = {}
        self.watched: dict[int, tuple[str, Retained]] = {}
        self.unreported: list[tuple[str, Retained]] = []
        self.trends: dict[str, Trend] = {}
        self._listen()

    def _listen(self) -> None:
        """Enable `forward_pre` only while a device is in use: a model may move to a device later."""
        self.context.listen("forward_pre", wanted=is_in_use())

    @hookimpl
    def forward_pre(self, module: Module, inputs: tuple[Any, ...]) -> None:
        """Note the bytes allocated."""
        device = next((of_tensor(tensor, "device") for tensor in tensors(inputs)), None)
        accelerator = accelerator_of(device.type) if device is not None else None
        if accelerator is None:  # it may move its inputs to the current device
            device, accelerator = None, next((one for one in accelerators() if one.is_in_use()), None)
        if accelerator is not None:
            self.entered[get_ident(), module.id] = (accelerator, device, accelerator.allocated(device))

    @hookimpl
    def forward(self, module: Module, output: Any) -> None:
        """Measure the outputs, and watch whether they are freed."""
        outputs = tensors(output)
        store = self.outputs.get(module.id)
        if store is None:
            store = self.outputs[module.id] = self.output.labels(module.name).set
        store(sum(map(nbytes, outputs)))
        entered = self.entered.pop((get_ident(), module.id), None)
        if entered is not None:
            accelerator, device, before = entered
            self.grown.labels(module.name).set(accelerator.allocated(device) - before)
        self._watch(module.id, module.name, outputs)

    @hookimpl
    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Watch whether the losses are freed."""
        self._watch(0, "", list(tensors))

    def _watch(self, number: int, name: str, outputs: list[Any]) -> None:
        tensor = next((t for t in outputs if of_tensor(t, "grad_fn") is not None), None)
        if tensor is None:
            return
        if number not in self.watched:
            self.watched[number] = (name, Retained(self.least_kept))
        retained = self.watched[number][1]
        if retained.watch(tensor, self.context.step):
            self.unreported.append((name, retained))

    @hookimpl
    def step_done(self) -> None:
        """Read the allocators' statistics, and report outputs that are retained."""
        self.allocators.publish()
        self._listen()
        if self.unreported:
            leaks, self.unreported = self.unreported, []
            self._report_retained(leaks)

    def _report_retained(self, leaks: list[tuple[str, Retained]]) -> None:
        # A model often returns the output of its last layer. The outer module comes later, and is the one reported.
        leaks = list({id(retained.last): (name, retained) for name, retained in leaks}.values())
        places = [f"the output of {name}" if name else "the loss" for name, _ in leaks]
        more = f" and {len(places) - LISTED} more" if len(places) > LISTED else ""
        since, size = min(retained.since for _, retained in leaks), sum(retained.nbytes for _, retained in leaks)
        self.context.incident(
            "leak",
            f"the training code keeps {', '.join(places[:LISTED])}{more} of every step, with its graph: none has been freed"
            f" since step {since} ({size} bytes per step, not counting the graph)",
            modules=[name or "(loss)" for name, _ in leaks],
            since_step=since,
            bytes_per_step=size,
        )

    @hookimpl
    def tick(self, now_s: float) -> None:  # noqa: ARG002 - a hook's arguments go by name
        """Read the memory of the process, and check every place for growth."""
        for place, value in [*self.resident.publish().items(), *self.allocators.lowest().items()]:
            if place not in self.trends:
                self.trends[place] = Trend(self.least_growth)
            self._follow(place, self.trends[place], value)

    def _follow(self, place: str, trend: Trend, value: int) -> None:
        if not trend.add(self.context.step, value):
            return
        self.growth.labels(place).set(trend.per_step)
        if trend.is_leak and not trend.is_reported:
            trend.is_reported = True
            self.context.incident(
                "leak",
                f"{'anonymous memory' if place == 'anonymous' else f'memory of {place}'} grows steadily: {trend.grown >> 20} MiB since step {trend.since},"
                f" {trend.per_step:.0f} bytes per step, without slowing down",
                place=place,
                since_step=trend.since,
                bytes_per_step=trend.per_step,
                grown_bytes=trend.grown,
            )

    @hookimpl
    def unconfigure(self) -> None:
        """Release the weak references."""
        self.watched.clear()
        self.unreported.clear()
