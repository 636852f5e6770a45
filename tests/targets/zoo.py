"""Every module of torch's own test database: for each case a line with a digest of all its results and lasting effects.

A case is one module, made with one set of arguments, in one mode and dtype: called inside a holder, run backward,
stepped, and in eval called once more without a graph (torch then takes other paths). The digest holds the outputs, the
shape of the graph, the gradients of inputs and parameters, the state after the step, the hooks on the module and the
state of the random generator, bit for bit; or the exception, if the case raises. The word before it says whether all
was finite: some modules return infinities for inputs from the database.
"""

import argparse
import hashlib
import itertools
import warnings

import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

GRAPH_LIMIT = 10_000


class Holder(nn.Module):
    """Calls a module as a model calls its layers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Digest:
    """A digest of all the values that were added to it."""

    def __init__(self):
        self._sum = hashlib.sha256()
        self.is_finite = True

    def add(self, value):
        if isinstance(value, torch.Tensor):
            self._add_tensor(value.detach())
        elif isinstance(value, dict):
            for key in value:
                self.add(key)
                self.add(value[key])
        elif isinstance(value, (tuple, list)):
            for item in value:
                self.add(item)
        else:
            self._sum.update(repr(value).encode() + b";")

    def _add_tensor(self, value):
        if value.layout != torch.strided:
            value = value.to_dense()
        self.is_finite &= bool(value.isfinite().all())
        self.add((value.dtype, tuple(value.shape), value.stride()))
        self._sum.update(value.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def __str__(self):
        return self._sum.hexdigest()[:16]


def tensors(value):
    """Return all tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []


def copied(value):
    """Copy the leaves of a graph, so that a module may work on them in place."""
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(copied(item) for item in value)
    return {k: copied(v) for k, v in value.items()} if type(value) is dict else value


def graph(outputs):
    """Return the names of the nodes of the graph below `outputs`, breadth first."""
    names, seen, todo = [], set(), [t.grad_fn for t in outputs if t.grad_fn is not None]
    while todo and len(seen) < GRAPH_LIMIT:
        node = todo.pop(0)
        if node not in seen:
            seen.add(node)
            names.append(node.name())
            todo += [following for following, _ in node.next_functions if following is not None]
    return names


def run(model, forward, digest):
    """Take one step of training; add everything that is visible of it."""
    outputs = tensors(model(*copied(forward.args), **copied(forward.kwargs)))
    digest.add(outputs)
    digest.add(graph(outputs))
    ends = [t for t in outputs if t.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.randn_like(t) for t in ends])
    parameters = [p for p in model.parameters() if p.requires_grad]
    leaves = [t for t in tensors([forward.args, forward.kwargs]) if t.is_leaf]
    digest.add([t.grad for t in leaves + parameters])
    if parameters:
        torch.optim.SGD(parameters, lr=0.01).step()


def finish(model, digest):
    """Add the state that is left at the end."""
    for module in model.modules():
        digest.add(sorted(k for k in vars(module) if k != "_compiled_call_impl"))
        digest.add([len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks")])
    digest.add(dict(model.state_dict()))
    digest.add(torch.get_rng_state())


def case(info, given, digest):
    """Run one case; return how it went: finite, nonfinite, or the exception's name."""
    given_to_make = given.constructor_input
    model = Holder(info.module_cls(*given_to_make.args, **given_to_make.kwargs)).train(info.training)
    try:
        model = model.to(info.dtype) if info.dtype.is_floating_point else model
        run(model, given.forward_input, digest)
        if not info.training:
            with torch.no_grad():
                digest.add(tensors(model(*given.forward_input.args, **given.forward_input.kwargs)))
        return "finite" if digest.is_finite else "nonfinite"
    except Exception as error:  # noqa: BLE001 - hookd must not change the words with which torch refuses
        digest.add(str(error))
        return type(error).__name__
    finally:
        finish(model, digest)


def cases(dtypes, most):
    """Yield the first `most` cases of every module in each mode and dtype: name, the module's entry, arguments."""
    for info, training in itertools.product(module_db, (True, False)):
        for dtype in [d for d in dtypes if d in info.dtypes]:
            info.training, info.dtype = training, dtype
            torch.manual_seed(0)
            made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
            for number, given in enumerate(made[:most]):
                mode = "train" if training else "eval"
                yield f"{info.name}/{mode}/{str(dtype).removeprefix('torch.')}/{number}", info, given


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--most", type=int, help="cases of a module in one mode and dtype; all by default")
    parser.add_argument("--only", type=argparse.FileType(), help="a file with the names of the cases to run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    only = set(arguments.only.read().split()) if arguments.only else None
    for name, info, given in cases([getattr(torch, name) for name in arguments.dtypes], arguments.most):
        if only is None or name in only:
            torch.manual_seed(1)
            digest = Digest()
            print(name, case(info, given, digest), digest, flush=True)


if __name__ == "__main__":
    main()
