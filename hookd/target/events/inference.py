"""Tells inference from training: forward calls that no backward follows, as of a validation, a rollout or a teacher.

It is decided at the beginning of each outermost call, for all calls inside of it. A call is inference if autograd is disabled, or if the model is in
`eval()`. Some trainings leave a model in `eval()` (to keep batch normalization as it is), so such a call is the training's if a backward
follows; the first one of each model is taken for inference before that is known.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from torch import is_grad_enabled

from hookd.api.passive import attributes_of, modules_in, parameters_of

if TYPE_CHECKING:
    from torch import nn

    from hookd.api.events import Module
    from hookd.target.entry.threads import ThreadState

_PLAIN = (dict, OrderedDict)


class Inference:
    """Decides which outermost calls are inference. Used in all threads that call modules."""

    def __init__(self) -> None:
        self._trained: set[int] = set()  # roots whose calls in `eval()` are followed by a backward, by Module.id
        # Whether a root has no parameters, by Module.id: its calls are inference after such a call of a model in `eval()`.
        self._neutral: dict[int, bool] = {}

    def begins(self, thread: ThreadState, root: Module) -> bool:
        """Return whether the outermost call of `root` that begins in the calling thread is inference."""
        # Once in a step, so all of it is cold: each function that is called here takes a microsecond.
        if not is_grad_enabled():
            return True
        module = root.torch()
        if module is None:
            return False
        is_neutral = self._neutral.get(root.id)
        if is_neutral is None:
            is_neutral = self._neutral[root.id] = not any(parameters_of(inner) for _, inner in modules_in(module))
        if is_neutral:  # such as a loss
            return bool(thread.in_eval)
        if _is_training(module) or root.id in self._trained:
            if thread.in_eval:
                thread.in_eval.clear()
            return False
        thread.in_eval.add(root.id)
        return True

    def backward_begins(self, thread: ThreadState) -> None:
        """Note that a backward begins, so the calls before it, which may have been taken for inference, are the training's."""
        if thread.in_eval:
            self._trained |= thread.in_eval
            thread.in_eval.clear()


def _is_training(module: nn.Module) -> bool:
    """Whether a module is in training mode, as `module.training`; that of a compiled one is its original's."""
    own = attributes_of(module)
    inside = own.get("_modules")
    # A scripted module has a table of another kind.
    original = None if inside is None or type(inside) not in _PLAIN else inside.get("_orig_mod")
    return (own if original is None else attributes_of(original)).get("training") is not False
