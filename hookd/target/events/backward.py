"""Gradients that enter and leave a module, without nodes added to the graph.

torch's own full backward hook inserts nodes (another accumulation order, so other bits), raises if an operation works in
place, and misses dict outputs. Here hooks are put on the existing autograd nodes:

- a pre-hook on each node that made an output sees the gradient of that output;
- a post-hook on each node of the module whose edge leads to an input (captured at entry as (grad_fn, output_nr),
  because an in-place operation rebases it) sees this module's share of that input's gradient. To replace the gradient, all
  but the last of these hooks return zeros, and the last returns the replaced sum.

A branch of the graph may be unused. So when the first hook runs, the engine is asked which of the others will run. A hook must
never hold a node that leads to it: the graph would be a reference cycle that is never freed. Nodes are held only by hooks on
nodes with a higher sequence number, which run earlier.

If only the time of a call is wanted, `hookd/native/spans.c` usually takes it. Before a call that is
hooked here ends, `spans.c` ends what it times inside of it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd.api.hookspecs import TIMES
from hookd.api.nested import is_tensor, tensors
from hookd.api.passive import of_tensor, requires_grad
from hookd.target.plugins.faults import Failure
from hookd.target.tensors.torch_state import is_unreal, unseen

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.events import Module
    from hookd.target.entry.threads import Threads, ThreadState
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.plugins.listeners import Listener

next_sequence = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
"""Returns the sequence number that the next node of the graph gets."""
will_run = getattr(torch._C, "_will_engine_execute_node", lambda _node: True)
"""Whether a node will run in the current backward."""
_is_grad_enabled = torch.is_grad_enabled
_node = getattr(torch._C, "_current_autograd_node", lambda: None)
_Tensor: Any = torch.Tensor
_grad_fn, _output_nr = _Tensor.grad_fn.__get__, _Tensor.output_nr.__get__  # a tensor subclass may override these
_WALK_LIMIT = 20_000
_ACCUMULATE = 1 << 63
"""Sequence numbers from this one on are AccumulateGrad's, which has UINT64_MAX and leads to no other node."""


class Spans(NamedTuple):
    """The functions of `hookd/native/spans.c` that are called from here.

    They identify a call by the id of its thread's state, the lowest sequence number of its nodes, and the ordinal
    of its return.

    Attributes:
        next_ordinal: returns a number that is higher than the ordinals of all calls inside of the one that has returned.
        close: ends what is timed inside of a call; takes the time at which the call ended, in ns of the monotonic clock.
        since: returns, of what is timed inside of a call and has begun before it, how many ns ago it began, and the thread's
            times at that moment (`inner`, `lost`, `recomputed`); None if there is nothing.
    """

    next_ordinal: Callable[[], int]
    close: Callable[[int, int, int, int], Any]
    since: Callable[[int, int, int], tuple[int, int, int, int] | None]


NO_SPANS = Spans(lambda: 0, lambda *_: None, lambda *_: None)
"""Stands in where calls are not entered in C."""
spans = NO_SPANS


def no_walk(_nodes: list[Any], _edges: list[Any], _sequence: int, _is_timed: bool) -> Any:  # noqa: FBT001  as C has it
    """Return None; replaces `walk_in_c` if calls are not entered in C."""
    return None


walk_in_c: Callable[
    [list[Any], list[Any], int, bool], tuple[dict[Any, Any], list[tuple[Any, list[tuple[int, int]]]]] | None
] = no_walk
"""Does what `_Walk` does; returns its `seen` and the arguments of `Entry` for each entry, or None to leave it to Python."""


class Entered:
    """The state of the graph when a module is entered.

    Attributes:
        lost: `thread.lost` when the call itself begins.
        sequence: sequence number of the graph's next node.
        edges: the edges of the positional inputs, None for an input that needs no gradient.
    """

    __slots__ = ("edges", "lost", "sequence", "thread")

    def __init__(self, thread: ThreadState, sequence: int, edges: list[tuple[Any, int] | None]) -> None:
        self.thread = thread
        self.lost = 0
        self.sequence = sequence
        self.edges = edges


class Slot(NamedTuple):
    """The position of an output tensor, and its output number at its node."""

    at: int
    nr: int


def _edge(x: Any) -> tuple[Any, int] | None:
    if not is_tensor(x) or not requires_grad(x):
        return None
    node = of_tensor(x, "grad_fn")
    if node is not None:
        return (node, of_tensor(x, "output_nr"))
    # A leaf's AccumulateGrad node is reached through a view, which must be hidden from the user's dispatch modes.
    with torch._C._DisableTorchDispatch():
        view: Any = _view_of_leaf(x)
    return None if view is None else (view.grad_fn.next_functions[0][0], 0)


def _view_of_leaf(x: torch.Tensor) -> torch.Tensor | None:
    try:
        return torch.Tensor.view_as(x, x)
    except (RuntimeError, NotImplementedError):  # sparse and nested tensors have no views
        return None


class Flow:
    """The gradients of one call during a backward through it.

    It does not hold a node of the module.

    Attributes:
        keeps_in: whether a listener takes the gradients of the inputs; if not, their shares are not summed.
        keeps_out: whether a listener takes the gradients of the outputs; if not, they are not held, so torch can reuse their
            memory.
        is_timed: whether a listener takes the time, which needs a hook on the last node.
        listeners: the listeners at the time of the call.
        elapsed_ns: duration of this backward, see `hookd.api.hookspecs.backward`; 0 until it is done.
        self_ns: the same without nested modules.
        maker: id of the state of the thread that has made the nodes.
        low: lowest sequence number of the nodes.
        ordinal: see `Spans`.
    """

    __slots__ = (
        "dispatch",
        "due",
        "due_in",
        "due_out",
        "elapsed_ns",
        "grads_in",
        "grads_out",
        "inner",
        "is_open",
        "is_timed",
        "keeps_in",
        "keeps_out",
        "listeners",
        "local",
        "lost",
        "low",
        "maker",
        "module",
        "mutates",
        "ordinal",
        "recomputed",
        "self_ns",
        "started",
        "thread",
        "was_used",
    )  # fmt: skip

    def __init__(self, module: Module, dispatch: Dispatch, local: Threads, listeners: list[Listener]) -> None:
        asked = frozenset(argument for listener in listeners for argument in listener.arguments)
        mutates = any(listener.mutates for listener in listeners)
        self.module = module
        self.listeners = listeners
        self.dispatch = dispatch
        self.local = local
        self.mutates = mutates
        self.keeps_in = mutates or "grad_input" in asked
        self.keeps_out = mutates or "grad_output" in asked
        self.is_timed = bool(asked & TIMES)
        self.is_open = self.was_used = False
        self.due_out = self.due_in = self.elapsed_ns = self.self_ns = 0
        self.started = self.inner = self.lost = self.recomputed = self.maker = self.low = self.ordinal = 0
        self.thread: ThreadState | None = None
        self.grads_in: list[Any] = []
        self.grads_out: list[Any] = []
        self.due: list[int] = []

    def expect(self, inputs: int, outputs: int) -> None:
        """Reset the gradients, for this number of inputs and outputs."""
        self.grads_in, self.grads_out, self.due = [None] * inputs, [None] * outputs, [0] * inputs

    def open(self, due_out: int, ends: list[Entry], begun: int) -> None:
        """Begin a backward whose first hook was called at `begun` ns; `due_out` nodes with outputs and the entries `ends` will run."""
        self.is_open = self.was_used = True
        self.thread = thread = self.local.thread
        self.started, self.inner, self.lost, self.recomputed = begun, thread.inner, thread.lost, thread.recomputed
        now = self.dispatch.accounts.clock()  # before `spans.since`, so that this call does not begin later
        before = spans.since(self.maker, self.low, self.ordinal)
        if before is not None:
            ago, self.inner, self.lost, self.recomputed = before
            self.started = now - ago
        self.elapsed_ns = self.self_ns = 0
        self.due_out, self.due_in = due_out, len(ends)
        for end_ in ends:
            for i in end_.inputs:
                self.due[i] += 1

    def stop(self, ended: int) -> None:
        """Take the time of this backward.

        With several GPUs it may end in another thread. Then nested modules are not deducted: each thread knows only its own.
        """
        spans.close(self.maker, self.low, self.ordinal, ended)
        thread = self.local.thread
        spent = ended - self.started
        self.elapsed_ns = self.self_ns = spent
        if thread is self.thread:
            spent -= thread.lost - self.lost
            self.elapsed_ns = spent - (thread.recomputed - self.recomputed)
            self.self_ns = max(0, spent - (thread.inner - self.inner))
            thread.inner = self.inner + spent

    def close(self) -> None:
        """Forget this backward's gradients; another one (retain_graph) starts afresh."""
        self.is_open = False
        self.thread = None
        self.expect(len(self.grads_in), len(self.grads_out))


class Entry:
    """A node of the module that leads to inputs.

    Args:
        node: the node, None if it is the one that the hook is on.
        places: pairs (index of the edge, index of the input).
    """

    __slots__ = ("inputs", "node", "places")

    def __init__(self, node: Any, places: list[tuple[int, int]]) -> None:
        self.node = node
        self.places = places
        self.inputs = sorted({i for _, i in places})


def begin(thread: ThreadState, args: tuple[Any, ...]) -> Entered | None:
    """Return the state of the graph before a module runs; None if no graph of the training's is being built."""
    if not _is_grad_enabled() or is_unreal():
        return None
    with unseen():
        return Entered(thread, next_sequence(), [_edge(x) for x in args])


def is_reentrant() -> bool:
    """Whether the graph of a call inside a backward will be used.

    True in the backward of a Python function (reentrant checkpointing: torch/utils/checkpoint.py
    `CheckpointFunction.backward`, 2.13). In a non-reentrant recompute, the graph of the first pass is used instead.
    """
    return isinstance(_node(), torch.autograd.function.BackwardCFunction)


def end(flow: Flow, args: tuple[Any, ...], output: Any, entered: Entered, *, heard_backward: bool) -> Any:
    """Hook the nodes that a call of a module made; `entered` is the result of `begin`.

    Listeners to `backward` (`heard_backward`) need a walk through the module's nodes.

    Returns:
        The output. For a mutator, an input that was returned unchanged (Identity, Dropout in eval) is replaced by a view:
        the view has its own node, whose gradient is separate from that of the input's other users.
    """
    outputs = tensors(output)
    flow.maker, flow.low, flow.ordinal = id(entered.thread), entered.sequence, spans.next_ordinal()
    flow.expect(len(args), len(outputs))
    mutates = flow.mutates
    if mutates:
        places = {id(x): i for i, x in enumerate(args) if entered.edges[i] is not None}
        passed = [(slot, places[id(t)]) for slot, t in enumerate(outputs) if id(t) in places]
        if passed:
            output = _viewed(output, places)
            outputs = tensors(output)
            _hook_passed(flow, passed, entered)
    slots = _made(outputs, entered, passed_too=mutates)
    # The node with the highest sequence number runs first, so a hook may hold the nodes that come after its own.
    nodes = sorted({id(n): n for n, _ in slots if n is not None}.values(), key=lambda n: -n._sequence_nr())
    walk = _Walk(nodes, entered, timed=flow.is_timed) if heard_backward else None
    for at, node in enumerate(nodes):
        mine = [Slot(slot, nr) for slot, (n, nr) in enumerate(slots) if n is node]
        later = nodes[at + 1 :]
        entries = [] if walk is None else walk.entries
        if len(nodes) > 1 and not mutates:
            # One output may be dropped while another lives on: hold only nodes that this node leads to.
            below = _Walk([node], entered, timed=flow.is_timed)
            later = [n for n in later if n in below.seen]
            entries = below.entries if walk is not None else []
        own = [Entry(None, e.places) for e in entries if e.node is node]
        under = [e for e in entries if e.node is not node and e.node._sequence_nr() < node._sequence_nr()]
        node.register_prehook(_before(flow, mine, later, own, under))
    for entry in walk.entries if walk is not None else ():
        node = entry.node
        node.register_hook(_after(flow, entry.places, entry.inputs))
    return output


def _made(outputs: list[torch.Tensor], entered: Entered, *, passed_too: bool) -> list[tuple[Any, int]]:
    """Return the node and the output number of each output tensor.

    The result is (None, 0) for a tensor that is not to be hooked. A module may return an input beside its own outputs, as a
    T5 block does with its position bias. The node of such a tensor belongs to the module that made it, and runs long after
    this module's backward, so it is left out. If a module makes no node of its own, such as Identity, these nodes are used.
    """
    with unseen():
        slots = [(_grad_fn(t), _output_nr(t)) for t in outputs]
    is_own = [node is not None and node._sequence_nr() >= entered.sequence for node, _ in slots]
    if passed_too or not any(is_own):
        return slots
    return [slot if own else (None, 0) for slot, own in zip(slots, is_own)]


def _hook_passed(flow: Flow, passed: list[tuple[int, int]], entered: Entered) -> None:
    """Hook the input's own node as a fallback. An in-place operation on the view drops the view's node."""
    for slot, i in passed:
        edge = entered.edges[i]
        if edge is not None and edge[0]._sequence_nr() < _ACCUMULATE:
            edge[0].register_prehook(_instead(flow, slot, i, edge[1]))


def _instead(flow: Flow, slot: int, i: int, nr: int) -> Any:
    def prehook(grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if flow.was_used:
            flow.was_used = False
            return None
        flow.grads_out[slot] = grads[nr]
        _replace(flow, "backward_pre", flow.grads_out, [slot])
        flow.grads_in[i] = flow.grads_out[slot]
        _replace(flow, "backward", flow.grads_in, [i])
        new = _with(grads, {nr: flow.grads_in[i]})
        flow.close()
        return new

    return prehook


def _viewed(output: Any, passed: dict[int, int]) -> Any:
    if is_tensor(output):
        return output.view_as(output) if id(output) in passed else output
    if type(output) in (tuple, list):
        return type(output)(_viewed(item, passed) for item in output)
    if type(output) is dict:
        return {key: _viewed(item, passed) for key, item in output.items()}
    return output


class _Walk:
    """The nodes that a module made, from some of its outputs down to its inputs.

    Attributes:
        seen: the nodes.
        entries: the nodes that lead to an input. If no input needs a gradient there are none, and the last node to run, the
            one with the lowest sequence number, marks the end of the module's backward. If the call is timed, that node is
            always added: the engine runs ready nodes in the order of their sequence numbers, and the nodes of a weight that
            the module computes (a parametrization) run after those that lead to an input.
    """

    def __init__(self, outputs: list[Any], entered: Entered, *, timed: bool = False) -> None:
        found = walk_in_c(outputs, entered.edges, entered.sequence, timed)
        self.seen: dict[Any, Any] = {} if found is None else found[0]
        self.entries: list[Entry] = [] if found is None else [Entry(*one) for one in found[1]]
        if found is not None:
            return
        edges = [(*edge, at) for at, edge in enumerate(entered.edges) if edge is not None]
        todo = [n for n in outputs if n._sequence_nr() >= entered.sequence]
        while todo and len(self.seen) < _WALK_LIMIT:
            node = todo.pop()
            if node not in self.seen:
                self.seen[node] = None
                self._visit(node, edges, entered.sequence, todo)
        if self.seen and (timed or not self.entries):
            last = min(self.seen, key=lambda n: n._sequence_nr())
            if not any(entry.node is last for entry in self.entries):
                self.entries.append(Entry(last, []))

    def _visit(self, node: Any, wanted: list[Any], sequence: int, todo: list[Any]) -> None:
        places = []
        for at, (following, nr) in enumerate(node.next_functions):
            inputs = [i for n, k, i in wanted if n is following and k == nr]
            if inputs:
                places.append((at, inputs[0]))
            elif following is not None and sequence <= following._sequence_nr() < _ACCUMULATE:
                todo.append(following)
        if places:
            self.entries.append(Entry(node, places))


def _before(flow: Flow, slots: list[Slot], outputs: list[Any], own: list[Entry], later: list[Entry]) -> Any:
    """Return the pre-hook of one node.

    The node has made the outputs in `slots`, and is the entry in `own`, if it is one. The nodes in `outputs` and the entries
    in `later` run after it.
    """

    def prehook(grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        accounts = flow.dispatch.accounts
        begun, before = accounts.clock(), accounts.charged
        if not flow.is_open:
            ends = own + [e for e in later if will_run(e.node)]
            flow.open(1 + sum(1 for n in outputs if will_run(n)), ends, begun)
        thread = flow.thread
        for slot in slots if flow.keeps_out else ():
            flow.grads_out[slot.at] = grads[slot.nr]
        if flow.mutates:  # mutators get None for outputs that this node did not make
            _replace(flow, "backward_pre", flow.grads_out, [slot.at for slot in slots])
        new = _with(grads, {slot.nr: flow.grads_out[slot.at] for slot in slots}) if flow.mutates else None
        flow.due_out -= 1
        if not flow.due_out:
            flow.dispatch.flow("backward_pre", flow, tuple(flow.grads_out), mutators=False)
            if not flow.due_in:
                _finish(flow, begun)
        _lose(flow, thread, begun, before)
        return new

    return _harmless(flow, prehook)


def added(one: Any, other: Any) -> Any:
    """Return the sum of two shares of a gradient, hidden from the user's dispatch modes."""
    if type(one) is not _Tensor or type(other) is not _Tensor:
        return one + other
    with unseen(), torch._C._DisableTorchDispatch():
        return one + other


def _harmless(flow: Flow, hook: Any) -> Any:
    """Return a hook that reports hookd's own errors. Autograd would otherwise raise them in the training."""

    def guarded(*grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        try:
            return hook(*grads)  # type: ignore[no-any-return]
        except Failure as failure:
            flow.dispatch.own_failure("the backward of a module", failure)
            return None

    # It does nothing in a compiled backward, whose graph may be older than the compilation.
    return flow.dispatch.callback(guarded)


def _replace(flow: Flow, hook: str, grads: list[Any], places: list[int]) -> None:
    part = tuple(grad if at in places else None for at, grad in enumerate(grads))
    new = flow.dispatch.flow(hook, flow, part, mutators=True)
    if new is not None:
        for at in places:
            grads[at] = new[at]


def _after(flow: Flow, places: list[tuple[int, int]], inputs: list[int]) -> Any:
    """Return the post-hook of one node that leads to inputs."""

    def posthook(grads_in: tuple[Any, ...], _grads_out: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not flow.is_open:
            return None
        accounts = flow.dispatch.accounts
        begun, before = accounts.clock(), accounts.charged
        thread = flow.thread
        # A sum that flows on into the training is an operation of the training.
        add = operator.add if flow.mutates else added
        for at, i in places if flow.keeps_in else ():
            share = grads_in[at]
            if share is not None:
                flow.grads_in[i] = share if flow.grads_in[i] is None else add(flow.grads_in[i], share)
        flow.due_in -= 1
        new = _replaced(flow, grads_in, places, inputs) if flow.mutates else None
        if not flow.due_in:
            _finish(flow, begun)
        _lose(flow, thread, begun, before)
        return new

    return _harmless(flow, posthook)


def _lose(flow: Flow, thread: ThreadState | None, begun: int, before: int) -> None:
    """Record the time of a hook, so that it is not counted as the module's."""
    accounts = flow.dispatch.accounts
    if thread is not None:
        thread.lost += accounts.clock() - begun
    if accounts.is_metered:
        accounts.settle(begun, before)


def _replaced(flow: Flow, grads_in: tuple[Any, ...], places: list[tuple[int, int]], inputs: list[int]) -> Any:
    """Return the gradients that flow on from one node.

    An input that still lacks a share gets zeros; an input whose shares have all arrived gets the replaced sum.
    """
    for i in inputs:
        flow.due[i] -= 1
    complete = [i for i in inputs if flow.due[i] == 0]
    if complete:
        _replace(flow, "backward", flow.grads_in, complete)
    final = {}
    for at, i in places:
        # If several edges of this node lead to one input, the sum goes through the first of them.
        final[at] = flow.grads_in[i] if i in complete else _zeros(grads_in[at])
        if i in complete:
            complete.remove(i)
    return _with(grads_in, final)


def _finish(flow: Flow, ended: int) -> None:
    flow.stop(ended)
    flow.dispatch.flow("backward", flow, tuple(flow.grads_in), mutators=False)
    flow.close()


def _zeros(grad: Any) -> Any:
    return None if grad is None else torch.zeros_like(grad)


def _with(grads: tuple[Any, ...], new: dict[int, Any]) -> tuple[Any, ...]:
    return tuple(new.get(at, grad) for at, grad in enumerate(grads))
