"""Models that are lazy, tied, changed, copied or converted while they are trained, and hooked by others."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from tests.support.evidence import ran
from tests.support.odd.table import batch, odd, sgd, stepping


def layers(*kinds):
    """Make a small model."""
    return nn.Sequential(nn.Linear(4, 4), *kinds, nn.Linear(4, 4))


def changing(model, change, kind=torch.optim.SGD):
    """Train, and change the model before each step; an optimizer is made anew when it holds others."""
    kept = []

    def step(number):
        change(model, number)
        loss = model(batch(number, 2, 4).to(next(model.parameters()).dtype)).square().mean()
        if not kept or {id(p) for p in kept[0].param_groups[0]["params"]} != {id(p) for p in model.parameters()}:
            kept[:] = [kind(model.parameters(), lr=0.05)]
        kept[0].zero_grad()
        loss.backward()
        kept[0].step()
        return loss.detach()

    return model, step


@odd
def lazy_modules():
    return sgd(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3)), 3, 4)


@odd
def lazy_convolutions():
    return sgd(nn.Sequential(nn.LazyConv2d(3, 3), nn.ReLU(), nn.LazyConvTranspose2d(3, 3)), 2, 3, 6, 6)


@odd
def tied_weights():
    model = layers(nn.Tanh())
    model[2].weight = model[0].weight
    return sgd(model, 2, 4)


@odd
def a_module_in_two_places():
    shared = nn.Linear(4, 4)
    return sgd(nn.Sequential(shared, nn.Tanh(), shared, nn.ModuleDict({"again": shared})["again"]), 2, 4)


@odd
def modules_that_come_and_go():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def change(model, number):
        if number in (1, 2, 4):
            model.blocks.append(nn.Linear(4, 4))
        elif number == 3:
            model.blocks = model.blocks[1:]

    return changing(Grows(), change)


@odd
def parameters_that_are_frozen_and_put_in_anew():
    def change(model, number):
        model[0].requires_grad_(number % 2 == 0)
        if number == 2:
            model[2].weight = nn.Parameter(torch.randn(4, 4))
        if number == 3:
            model[2].register_parameter("bias", None)

    return changing(layers(nn.Tanh()), change)


@odd
def other_types():
    def change(model, number):
        model.to([torch.float32, torch.float64, torch.bfloat16][number % 3])

    return changing(layers(nn.LayerNorm(4)), change)


@odd
def parameters_that_are_swapped():
    future = torch.__future__
    if not hasattr(future, "set_swap_module_params_on_conversion"):
        return sgd(layers(), 2, 4)

    def change(model, number):
        before = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(True)
        try:
            model.double() if number % 2 else model.float()
        finally:
            future.set_swap_module_params_on_conversion(before)

    return changing(layers(nn.Tanh()), change)


@odd
def copies_and_pickles():
    def change(model, number):
        if number == 1:
            model.load_state_dict(copy.deepcopy(model).state_dict())
        if number == 2:
            model[0] = pickle.loads(pickle.dumps(model[0]))
        if number == 3:
            buffer = io.BytesIO()
            torch.save(model.state_dict(), buffer)
            buffer.seek(0)
            model.load_state_dict(torch.load(buffer), assign=True)

    return changing(layers(nn.Tanh()), change)


@odd
def an_average_of_the_model():
    model = layers(nn.BatchNorm1d(4))
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)

    def loss(number):
        average.update_parameters(model)
        x = batch(number, 3, 4)
        return model(x).square().mean() + average(x).square().mean().detach()

    return stepping(nn.ModuleList([model, average]), loss, torch.optim.SGD(model.parameters(), lr=0.05))


def called_with(model, factor):
    """Call a model with other parameters than its own."""
    call = torch.func.functional_call if hasattr(torch, "func") else nn.utils.stateless.functional_call

    def loss(number):
        scaled = {name: value * factor for name, value in model.named_parameters()}
        return call(model, scaled, (batch(number, 2, 4),)).square().mean()

    return stepping(model, loss)


@odd
def functional_calls():
    return called_with(layers(nn.Tanh()), 0.5)


@odd
def functional_calls_of_parametrized_modules():
    return called_with(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), 1.5)


@odd
def gradients_by_functions():
    model = layers(nn.Tanh())
    if not hasattr(torch, "func"):
        return sgd(model, 2, 4)

    def step(number):
        def loss(parameters, x):
            return torch.func.functional_call(model, parameters, (x,)).square().mean()

        x, parameters = batch(number, 2, 4), dict(model.named_parameters())
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.sub_(0.05 * each[name].mean(0))
        return loss(parameters, x).detach()

    return model, step


@odd
def activation_checkpoints():
    class Checkpointed(nn.Module):
        def __init__(self, *, is_reentrant):
            super().__init__()
            self.inner, self.is_reentrant = layers(nn.Dropout(0.5)), is_reentrant

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=self.is_reentrant)

    return sgd(nn.Sequential(nn.Linear(4, 4), Checkpointed(is_reentrant=True), Checkpointed(is_reentrant=False)), 2, 4)


@odd
def work_in_place():
    return sgd(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.Linear(4, 4)), 2, 4
    )


@odd
def sparse_gradients():
    model = nn.Sequential(nn.Embedding(16, 4, sparse=True), nn.Linear(4, 4))
    optimizers = torch.optim.SparseAdam(model[0].parameters(), lr=0.05), torch.optim.SGD(model[1].parameters(), lr=0.05)
    return stepping(model, lambda number: model(torch.tensor([number, number, 3])).square().mean(), *optimizers)


@odd
def hooks_of_others():
    model = layers(nn.Tanh())

    def pre(module, args, kwargs):
        ran("a pre-hook", draws=False)
        return (args[0] * 1.5,), kwargs

    def post(module, args, kwargs, output):
        ran("a hook", draws=False)
        return output + 0.5

    def back(module, grad_input, grad_output):
        ran("a backward hook", draws=False)
        return tuple(None if g is None else g * 0.5 for g in grad_input)

    model[0].register_forward_pre_hook(pre, with_kwargs=True)
    model[1].register_forward_hook(post, with_kwargs=True)
    model[2].register_full_backward_hook(back)
    model[2].register_full_backward_pre_hook(lambda module, grads: tuple(g * 2 for g in grads))
    model[0].weight.register_hook(lambda grad: ran("a gradient's hook", draws=False) or grad * 0.5)
    if hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
        model[0].bias.register_post_accumulate_grad_hook(lambda p: ran("a parameter's hook", draws=False))
    model[0]._register_state_dict_hook(lambda *_: ran("a state_dict hook"))
    return sgd(model, 2, 4)


@odd
def hooks_of_others_on_all_modules():
    model = layers(nn.Tanh())
    own_model, own_step = sgd(model, 2, 4)

    def step(number):
        handles = [
            torch_module.register_module_forward_pre_hook(lambda module, args: ran("before", draws=False)),
            torch_module.register_module_forward_hook(lambda module, args, output: output * 1.5),
            torch_module.register_module_full_backward_hook(lambda *_: ran("after", draws=False)),
        ]
        try:
            return own_step(number)
        finally:
            for handle in handles:
                handle.remove()

    return own_model, step


@odd
def hooks_that_raise_and_hooks_that_always_come():
    model = layers(nn.Tanh())

    def refuse(module, args):
        if module.calls == 1:
            raise KeyError("a hook of the training's own")
        module.calls += 1

    model[2].calls = 0
    model[2].register_forward_pre_hook(refuse)
    model[2].register_forward_hook(lambda *_: ran("always", draws=False), always_call=True)
    return sgd(model, 2, 4)


@odd
def errors_and_warnings_of_a_module():
    import warnings

    class Complains(nn.Linear):
        def forward(self, x):
            warnings.warn(f"a warning in {type(self).__name__}", UserWarning, stacklevel=2)
            if x[0, 0] > 0.5:
                raise ArithmeticError("too large")
            return super().forward(x)

    return sgd(nn.Sequential(nn.Linear(4, 4), Complains(4, 4)), 2, 4)


@odd
def a_scripted_and_a_traced_module():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)))
    return sgd(model, 2, 4)


@odd
def a_wrapped_model():
    return sgd(nn.DataParallel(layers(nn.Tanh())), 2, 4)


@odd
def shared_tables_of_parameters():
    """Train with a dict of parameters that acts at each access, as DeepSpeed's does."""

    class Table(dict):
        def __getitem__(self, key):
            ran(f"_parameters[{key}]")
            return super().__getitem__(key)

        def items(self):
            ran("_parameters.items")
            return super().items()

        def values(self):
            ran("_parameters.values")
            return super().values()

        def get(self, key, default=None):
            ran("_parameters.get")
            return super().get(key, default)

    model = layers(nn.BatchNorm1d(4))
    for module in model:
        module._parameters = Table(module._parameters)
    return sgd(model, 3, 4)
