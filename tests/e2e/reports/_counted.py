"""A mixin for models that count their own calls, for scripts that train, validate and roll out."""

import collections

import torch

CALLS = collections.Counter()


class Counted:
    """Counts training calls, their samples, and calls that no backward follows."""

    def forward(self, x, **more):
        if torch.is_grad_enabled():
            CALLS["training"] += 1
            CALLS["samples"] += len(x)
        else:
            CALLS["inference"] += 1
        return super().forward(x, **more)
