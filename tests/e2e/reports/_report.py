"""Shared by these scripts: a line for each step, and at the end what the script itself has counted. Knows nothing of hookd."""

import argparse
import hashlib
import json
import time

import torch

_parser = argparse.ArgumentParser()
_parser.add_argument("--steps", type=int, default=60)
_parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep after each step")
arguments = _parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)


def steps():
    """Count the steps, from 1."""
    for step in range(1, arguments.steps + 1):
        yield step
        time.sleep(arguments.pause)


def tell(step, loss):
    print(f"step {step} loss {loss.item().hex()}", flush=True)


def norms(**modules):
    """Return the norms of each module's own gradients and parameters, as they are now."""

    def norm(tensors):
        dense = [t.to_dense() if t.is_sparse else t for t in tensors]
        return torch.cat([t.detach().reshape(-1).double() for t in dense]).norm().item() if dense else 0.0

    own = {name: list(module.parameters(recurse=False)) for name, module in modules.items()}
    return {name: [norm([p.grad for p in ps if p.grad is not None]), norm(ps)] for name, ps in own.items()}


def finish(*modules, **counted):
    """Print the counts, and a checksum of all parameters and buffers; without modules, as on ranks other than 0, no checksum."""
    digest = hashlib.sha256()
    for module in modules:
        for name, value in sorted(torch.nn.Module.state_dict(module).items()):
            digest.update(name.encode() + value.detach().double().numpy().tobytes())
    print("counted", json.dumps(counted), flush=True)
    if modules:
        print("done", digest.hexdigest(), flush=True)
