"""Weights that are computed: to read one is to compute it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.support.evidence import ran
from tests.support.odd.table import batch, odd, sgd, stepping

CONVOLVED = (2, 3, 5, 5)


class Drawn(nn.Module):
    """Adds noise, and so draws random numbers wherever the weight is read."""

    def forward(self, weight):
        ran("a parametrization")
        return weight + 0.01 * torch.randn_like(weight)


class Refused(nn.Module):
    """Computes a weight for a forward only."""

    def __init__(self):
        super().__init__()
        self.is_open = True

    def forward(self, weight):
        ran("a parametrization")
        if not self.is_open:
            raise ZeroDivisionError("read outside of a forward")
        return weight * 1.0


def drawn(module, name="weight"):
    """Parametrize a tensor of a module with noise."""
    parametrize.register_parametrization(module, name, Drawn())
    return module


@odd
def spectral_norm():
    return sgd(parametrizations.spectral_norm(nn.Linear(4, 4)), 2, 4)


@odd
def weight_norm():
    return sgd(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU()), 2, 4)


@odd
def orthogonal():
    return sgd(parametrizations.orthogonal(nn.Linear(4, 4)), 2, 4)


@odd
def spectral_norm_of_a_convolution():
    return sgd(parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), *CONVOLVED)


@odd
def spectral_norm_of_a_transposed_convolution():
    return sgd(parametrizations.spectral_norm(nn.ConvTranspose2d(3, 4, 3)), *CONVOLVED)


@odd
def spectral_norm_of_an_embedding():
    model = parametrizations.spectral_norm(nn.Embedding(8, 4))
    return stepping(model, lambda number: model(torch.arange(4) + number % 4).square().mean())


@odd
def spectral_norm_that_is_frozen():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0].requires_grad_(requires_grad=False)
    return sgd(model, 2, 4)


@odd
def old_spectral_norm():
    return sgd(nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))), 2, 4)


@odd
def old_weight_norm():
    return sgd(nn.utils.weight_norm(nn.Linear(4, 4)), 2, 4)


@odd
def pruned():
    model = nn.Linear(4, 4)
    prune.l1_unstructured(model, "weight", 0.5)
    return sgd(model, 2, 4)


@odd
def noise_on_a_weight():
    return sgd(nn.Sequential(drawn(nn.Linear(4, 4)), nn.Tanh(), drawn(nn.Linear(4, 4), "bias")), 2, 4)


@odd
def noise_on_a_batch_norm():
    return sgd(nn.Sequential(drawn(nn.BatchNorm1d(4)), nn.Linear(4, 4)), 3, 4)


@odd
def noise_on_a_batch_norm_in_eval_mode():
    model = nn.Sequential(drawn(nn.BatchNorm1d(4)), nn.Linear(4, 4))
    model[0].eval()
    return sgd(model, 3, 4)


@odd
def noise_on_a_buffer():
    return sgd(nn.Sequential(drawn(nn.BatchNorm1d(4), "running_mean"), nn.Linear(4, 4)).eval(), 3, 4)


@odd
def noise_on_a_layer_norm():
    return sgd(nn.Sequential(drawn(nn.LayerNorm(4)), nn.Linear(4, 4)), 3, 4)


@odd
def noise_on_a_recurrent_module():
    return sgd(drawn(nn.LSTM(4, 4), "weight_hh_l0"), 3, 2, 4, loss=lambda y: y[0].square().mean())


@odd
def noise_in_attention():
    model = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    drawn(model.self_attn.out_proj)
    drawn(model.self_attn, "in_proj_weight")
    return sgd(model, 2, 3, 4)


@odd
def noise_in_attention_with_own_widths():
    model = nn.MultiheadAttention(4, 2, kdim=6, vdim=6)
    drawn(model, "q_proj_weight")
    return sgd(model, 3, 2, 4, loss=lambda y: y[0].square().mean(), key=torch.ones(3, 2, 6), value=torch.ones(3, 2, 6))


@odd
def two_parametrizations_on_one_weight():
    return sgd(drawn(drawn(nn.Linear(4, 4))), 2, 4)


@odd
def a_parametrization_that_raises_outside_of_a_forward():
    model = nn.Sequential(nn.Linear(4, 4))
    own = Refused()
    parametrize.register_parametrization(model[0], "weight", own)

    def opened(module, args):
        own.is_open = True

    def closed(module, args, output):
        own.is_open = False

    model[0].register_forward_pre_hook(opened)
    model[0].register_forward_hook(closed)
    return sgd(model, 2, 4)


@odd
def parametrizations_that_are_cached():
    model = nn.Sequential(drawn(nn.Linear(4, 4)), drawn(nn.Linear(4, 4)))
    own_model, own_step = stepping(model, lambda number: model(model(batch(number, 2, 4))).square().mean())

    def step(number):
        with parametrize.cached():
            return own_step(number)

    return own_model, step


@odd
def parametrizations_that_come_and_go():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss(number):
        if number % 2:
            drawn(model[0])
        elif number:
            parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
        return model(batch(number, 2, 4)).square().mean()

    return stepping(model, loss, torch.optim.SGD(model.parameters(), lr=0.05))
