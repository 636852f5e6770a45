"""The micro-batches of a step, for several orders of calls, backwards and optimizers."""

from types import SimpleNamespace

import pytest

from hookd.target.events.micro_batches import MicroBatches

LOOPS = {
    "plain": ("cb(o)", 1),
    "accumulation": ("cbcbcb(o)", 3),
    "lightning": ("cbcb(cbo)", 3),
    "lbfgs": ("(cbcbcbo)", 1),
    "two losses of one call": ("cbb(o)", 1),
    "two calls of one loss": ("ccb(o)", 1),
    "functional": ("b(o)", 1),
    "gan": ("xcb(o)cb(o)", 1),
    "gan that accumulates": ("cbcb(o)cbcb(o)", 2),
    "a step that raised": ("cb(", 1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_micro_batches_of_a_step(name):
    loop, expected = LOOPS[name]
    counted = MicroBatches()
    acts = {
        "c": lambda: counted.call_begins(SimpleNamespace(name="(root)")),
        "x": lambda: counted.call_begins(SimpleNamespace(name="#Critic.(root)")),
        "b": counted.backward_begins,
        "(": counted.optimizer_begins,
        "o": counted.optimizer_done,
        ")": lambda: None,
    }
    for _ in range(2):
        for act in loop:
            acts[act]()
        assert counted.take() == expected
