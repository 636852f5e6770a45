"""Prints one line for each event of a module, among the program's own lines, so that their order can be compared."""

from hookd import Plugin, hookimpl, tensors


class Tape(Plugin):
    name = "tape"

    @hookimpl
    def forward_pre(self, module, inputs, kwargs):
        self.note("forward_pre", module, f"{len(inputs)}+{len(kwargs)}")

    @hookimpl
    def forward(self, module, output):
        self.note("forward", module, f"{len(tensors(output))}")

    @hookimpl
    def forward_error(self, module, error):
        self.note("forward_error", module, type(error).__name__)

    @hookimpl
    def backward_pre(self, module, grad_output):
        self.note("backward_pre", module, " ".join("-" if g is None else "g" for g in grad_output))

    @hookimpl
    def backward(self, module, grad_input):
        self.note("backward", module, " ".join("-" if g is None else "g" for g in grad_input))

    @staticmethod
    def note(event, module, what):
        print(f"hookd| {event} {module.name} {what}", flush=True)
