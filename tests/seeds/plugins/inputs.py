"""Two plugins that replace inputs and outputs, each seeing what the other returned: see programs/s3.py."""

import torch

from hookd import Plugin, hookimpl


class Double(Plugin):
    name = "double"
    mutates = True

    @hookimpl
    def select(self, module):
        return module.type.startswith("Chosen")

    @hookimpl(tryfirst=True)
    def forward_pre(self, inputs):
        return inputs[0] * 2 if inputs else None  # no tuple: it is wrapped into one

    @hookimpl(tryfirst=True)
    def forward(self, module, output):
        return None if module.type == "ChosenPair" else output * 3


class Shift(Plugin):
    name = "shift"
    mutates = True

    @hookimpl
    def select(self, module):
        return module.type.startswith("Chosen")

    @hookimpl(trylast=True)
    def forward_pre(self, module, inputs, kwargs):
        if module.type == "ChosenOptional":
            return (), kwargs
        return (inputs[0] + 1, *inputs[1:]), {name: value - 1 for name, value in kwargs.items()}

    @hookimpl(trylast=True)
    def forward(self, module, inputs, output):
        if module.type == "ChosenPair":
            return {"first": output[0], "second": output[1]}
        return output - inputs[0] if inputs else output - 1


class Everywhere(Plugin):
    """Adds a thousand to the output of every module."""

    name = "everywhere"
    mutates = True

    @hookimpl
    def forward(self, output):
        return output + 1000 if isinstance(output, torch.Tensor) else None
