"""Trainings in which a tensor that hookd meets has no memory, or no longer has it.

    python no_memory.py PROGRAM [PLUGIN...]

Prints a digest of the losses, of the weights and of how often the code of a tensor's class has run: the same with and
without plugins, which are `NAME` or `NAME:option=value`. hookd is imported only for plugins.
"""

import hashlib
import math
import os
import sys
import tempfile

import torch
from torch import nn
from torch.utils._pytree import tree_map

STEPS = 4


class Wrapped(torch.Tensor):
    """A tensor without storage; its numbers are in another one: the pattern of quantised and sharded parameters."""

    calls = 0

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, requires_grad=False)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        Wrapped.calls += 1
        args, kwargs = tree_map(opened, (args, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


def opened(value):
    return value.inner if isinstance(value, Wrapped) else value


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(Wrapped(torch.full((4,), 0.5)))

    def forward(self, x):
        return self.p * x


class View(nn.Module):
    """Returns a view of a tensor that has been freed, as offloading leaves it."""

    def __init__(self):
        super().__init__()
        self.emptied = torch.ones(64)[16:]
        self.emptied.untyped_storage().resize_(0)

    def forward(self, x):
        return self.emptied, x


class Outer(nn.Module):
    """Calls a module, and then frees (and makes room for) its output."""

    def __init__(self, inner, grows):
        super().__init__()
        self.inner = inner
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.grows = grows

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            mask = self.inner(x)
            y = x * mask.clone()
        storage = mask.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        if self.grows:
            storage.resize_(size)
            mask.data.fill_(1.0)
        return self.last(x + y.detach())


class Offloading(torch.optim.SGD):
    """Takes the parameters, and their old values, out of memory after each step."""

    def step(self, closure=None):
        found = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.kept = p.detach().clone()
                for one in (p, p.grad):
                    one.untyped_storage().resize_(0)
        return found


class Fetching(nn.Module):
    """Brings its parameters back before it needs them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        for p in self.parameters():
            if hasattr(p, "kept"):
                p.untyped_storage().resize_(p.kept.nbytes)
                p.data.copy_(p.kept)
        return self.layers(x)


class Truncated(nn.Module):
    """Has a parameter in a file that has been truncated, and never uses it."""

    def __init__(self, mapped):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.unused = nn.Parameter(mapped)

    def forward(self, x):
        return self.layer(x)


def train(model, x, optimizer=None, loss_of=torch.sum):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        yield opened(loss.detach())
    yield from (getattr(p, "kept", opened(p.detach())) for p in model.parameters() if p.requires_grad)


def wrapper():
    return train(Scale(), torch.ones(4))


def freed():
    model = nn.ModuleDict({"view": View(), "layer": nn.Linear(8, 1)})
    model.forward = lambda x: model["layer"](model["view"](x)[1])
    return train(model, torch.ones(2, 8))


def freed_inside():
    return train(Outer(nn.Sequential(nn.Linear(8, 8), nn.Softplus()), grows=False), torch.ones(2, 8))


def freed_and_grown():
    return train(Outer(nn.Sequential(nn.Linear(8, 8), nn.Softplus()), grows=True), torch.ones(2, 8))


def offloaded():
    model = Fetching()
    optimizer = Offloading(model.parameters(), lr=0.1, foreach=False)
    return train(model, torch.ones(2, 8), optimizer)


def truncated():
    directory = tempfile.mkdtemp()
    path = os.path.join(directory, "weights.pt")
    torch.save({"w": torch.ones(1 << 20)}, path)
    mapped = torch.load(path, mmap=True)["w"]
    model = Truncated(mapped)
    os.truncate(path, 4096)
    return (one for one in train(model, torch.ones(2, 8)) if one.numel() < 1 << 20)


def meta():
    inner = nn.Linear(8, 8, device="meta")
    model = nn.ModuleDict({"inner": inner, "layer": nn.Linear(8, 1)})

    def forward(x):
        model["inner"](x.to("meta"))
        return model["layer"](x)

    model.forward = forward
    for p in inner.parameters():
        p.requires_grad_(False)
    return train(model, torch.ones(2, 8))


def nested():
    """Nested tensors, strided and jagged, go through layers that timing has formulas for."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Inner(), nn.Linear(8, 1)

        def forward(self, x):
            parts = [x, x[:1]]
            strided = self.inner(torch.nested.as_nested_tensor(parts)).to_padded_tensor(0.0)
            jagged = self.inner(torch.nested.as_nested_tensor(parts, layout=torch.jagged)).values()
            return self.last(strided).sum() + self.last(jagged).sum()

    inner = Inner()  # as a root, whose first input it is
    for one in (torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)]),):
        inner(one).to_padded_tensor(0.0).sum().backward()
    yield inner.layer.weight.grad
    yield from train(Both(), torch.ones(2, 8))


def spoiled():
    """Make a bad value, which hookd then investigates, with tensors around it that have no memory."""
    emptied = torch.ones(64)[16:]
    emptied.untyped_storage().resize_(0)

    class Spoils(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.layer = Scale(), nn.Linear(4, 4)
            self.register_buffer("gone", emptied)
            self.register_buffer("zero", torch._efficientzerotensor(8))

        def forward(self, x, unused):
            with torch.no_grad():
                early = nn.functional.softplus(self.layer(x))
            y = self.layer(x + early.clone()) * math.inf
            early.untyped_storage().resize_(0)
            return y + opened(self.scale(torch.ones(4)).detach())

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.spoils = Spoils()

        def forward(self, x):
            return self.spoils(x, emptied)

    model = Calls()
    optimizer = torch.optim.SGD(model.spoils.layer.parameters(), lr=0.1)
    return train(model, torch.ones(2, 4), optimizer)


def functional():
    """Train with outputs that are tensors that a transform has left behind."""
    left = []
    torch.vmap(lambda one: left.append(one) or one)(torch.ones(3, 8))
    torch.func.grad(lambda one: left.append(one) or one.sum())(torch.ones(8))
    left += [torch._to_functional_tensor(torch.ones(8)), torch._efficientzerotensor(8)]

    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x):
            return self.layer(x)

    class Gives(nn.Module):
        def __init__(self, one):
            super().__init__()
            self.one = one

        def forward(self, x):
            return self.one

    model = Leaves()
    model.given = nn.ModuleList(map(Gives, left))
    model.forward = lambda x: [one(x) for one in model.given] and model.layer(x)
    return train(model, torch.ones(2, 8))


def rate():
    """Train with a learning rate that has been offloaded together with the rest of its optimizer."""
    gone = torch.tensor(0.1)
    gone.untyped_storage().resize_(0)

    class Gone(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(parameter.grad, alpha=-0.1)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = Gone(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = gone
    return train(model, torch.ones(2, 8), optimizer)


PROGRAMS = (
    wrapper, freed, freed_inside, freed_and_grown, offloaded, truncated, meta, functional, nested, spoiled, rate,
)  # fmt: skip


def requested(plugin):
    name, *options = plugin.split(":")
    return name, dict(option.split("=") for option in options)


def main(name, plugins):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if plugins:
        import hookd

        hookd.start([requested(plugin) for plugin in plugins])
    digest = hashlib.sha256()
    for tensor in next(one for one in PROGRAMS if one.__name__ == name)():
        digest.update(repr((tuple(tensor.shape), tensor.tolist())).encode())
    if plugins:
        found = hookd.read()["plugins"]
        assert all(one["state"] == "active" and not one["errors"] for one in found), found
        hookd.stop()
    print(digest.hexdigest(), Wrapped.calls)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
