"""The code that runs at every call of an observed module. Runs in the target.

A *plan* is a function made for one module: the callbacks that the plugins want there, unrolled in pluggy's order,
each behind its own guard. Its source is generated, as `dataclasses` generates `__init__`, because a loop over
callbacks, an event object and pluggy's own call would each cost more than all the rest (pluggy alone 1-2 us an event).
The source depends only on which hooks of which plugins listen, so it is compiled once per such *shape* and bound to
each module by a closure.

In the source, upper-case words are replaced; all lower-case names are globals of the plan's namespace: `cells` (the
page), `local` (the threads), `clock`, `versions_of`, what `Portions.names` gives, `f_<n>_<hook>` and `on_<n>_<hook>`
(plugin n's callback and whether it is on).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.api.hookspecs import TENSORS, TIMES
from hookd.wire.page import CALL_RECORD, MODULE, STEP

if TYPE_CHECKING:
    from types import CodeType

    from hookd.api.events import Module
    from hookd.target.entry.threads import Top
    from hookd.target.plugins.listeners import Listener

BODY = """
def make(module, number, again, metered):
    def run(self, args, kwargs):
        BEGUN
        thread = local.thread
        if BUSY:
            return CALL
        top = thread.top
        WRAPPED
        if (top is None or thread.backwards) and graph_task() != -1:
            return again(self, args, kwargs)
        METERED
        beat = thread.beat
        try:
            thread.top = STACK
            cells[beat] = number
            NOTE
            ENTER
            PRE
            AWAY
            output = CALL
            BACK
            POST
        except BaseException as error:
            unwind(thread, top, module, error)
            STOPPED
            raise
        thread.top = top
        REMEMBER
        LEAVE
        AWAY
        return output
    return run
"""
# The heartbeat's cells in the order of the page: module, events, phase. Events are counted at outermost calls alone:
# a read-modify-write costs three times a store, and a store of an int, which has to become a float, twice. Inside a recompute `backwards` is not 0, nor in autograd's threads.

FIRST_PASS = {
    "ENTER": "if top is None:\n    cells[beat + 1] += 1.0\n    begins(thread)",
    "LEAVE": "if top is None:\n    cells[beat] = 0.0\n    ends(thread)\nelse:\n    cells[beat] = top[2]",
}
# In one step of some the time is taken: of each plugin, and of all that is not the training's own code. The plans of such a
# step are others, so that those of all other steps have nothing of it but the question. The recorder too has only their calls.
METERED = {"BEGUN": "begun, before = clock(), ledger.charged", "AWAY": "settle(begun, before)",
           "BACK": "begun, before = clock(), ledger.charged", "METERED": "",
           "NOTE": f"record({CALL_RECORD}, number, cells[beat + {STEP - MODULE}])"}  # fmt: skip
UNMETERED = {"BEGUN": "", "AWAY": "", "BACK": "", "NOTE": "",
             "METERED": "if accounting:\n    return metered(self, args, kwargs)"}  # fmt: skip
RECOMPUTE = {"ENTER": "", "LEAVE": "cells[beat] = 0.0 if top is None else top[2]"}

# Of a module and a wrapper of the same name the wrapper's call is the one to report; a call of the very same object is one more.
WRAPPED = """
is_nested = top is not None and top[0] is module
if is_nested and top[3:] != (id(self),):
    thread.top = (module, top[1], number, id(self))
    try:
        return CALL
    finally:
        thread.top = top
""".strip()

# A call that waits, one that nobody is told of, and the versions of its inputs (`hookd.target.events.batching`). What nearly all
# need is written out here: to enter a function costs 3 us where the training has had the processor's cache to itself.
# An inference tensor has no version; a mode would see that it is asked for, and a trace would have the size in it. 1 and 2 are WAITS and CHANGES there.
HOLD = """
waits = module._waits
if (
    top is not None and waits and type(output) is Tensor and not function_modes()
    and tracing() is None and (waits == 1 or is_finite(output))
):
    try:
        held = new(Call, (module, args, kwargs, output, output._version, versions, thread.top, waits == 2))
    except Failure as failure:
        hold(thread, new(Call, (module, args, kwargs, output, -1, versions, thread.top, False)), failure)
    else:
        thread.held.append(held)
        thread.held_size += output.numel() + LEAST
        if thread.held_size >= ENOUGH:
            hand_over(thread)
else:
    hold(thread, new(Call, (module, args, kwargs, output, -1, versions, thread.top, False)), None)
""".strip()
REMEMBER = """
if module._waits and thread.kept < KEPT and type(output) is Tensor and not function_modes() and tracing() is None:
    try:
        thread.returned.append(new(Call, (module, args, kwargs, output, output._version, (), None, False)))
        thread.kept += output.numel() + LIGHT
    except Failure as failure:
        remember(thread, new(Call, (module, args, kwargs, output, -1, (), None, False)), failure)
else:
    remember(thread, new(Call, (module, args, kwargs, output, -1, (), None, False)), None)
""".strip()
VERSIONS = """
try:
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor and not function_modes():
        versions = (args[0]._version,)
    else:
        versions = versions_of(args, kwargs)
except Failure as failure:
    versions = unversioned(failure)
""".strip()

LOOK = "look(thread, new(Call, (module, args, kwargs, output, -1, versions, thread.top, False)))"

# What a thread has spent so far is on its state: `inner` in observed calls, `lost` in hookd's own hooks on the graph,
# `again` in recomputes. A call remembers how they stood when it began, and its caller is told of its time by one store;
# so an exception leaves them right, and an inner call cannot be counted twice.
CLOCK = "inner = thread.inner\nstarted = clock()\n"
ELAPSED = "elapsed_ns = clock() - started\n"
OWN = "self_ns = elapsed_ns - thread.inner + inner\nthread.inner = inner + elapsed_ns\n"
HOOKED = "if flow is not None:\n    elapsed_ns -= thread.lost - flow.lost\n"
AGAIN = "thread.again = again_before + elapsed_ns\n"


def source(listeners: tuple[Listener, ...], call: str, *, recompute: bool, wrapped: bool, metered: bool = False) -> str:
    """Write the source of the plans of one shape.

    Args:
        listeners: what listens, in the order of calling.
        call: the expression that runs the module as if hookd were not there.
        recompute: for calls made again by activation checkpointing inside a backward.
        wrapped: for modules that may stand inside a wrapper of the same name, whose call is then the one to report.
        metered: for the steps in which the time is taken that hookd needs.
    """
    parts = {
        **(RECOMPUTE if recompute else FIRST_PASS),
        **(METERED if metered else UNMETERED),
        "CALL": call,
        "WRAPPED": "",
    }
    if recompute:
        parts["METERED"] = ""
    # What a mutator does must not be baked into a trace; observers of tensors see to that in their own bracket.
    parts["BUSY"] = "thread.busy or is_unreal()" if any(one.mutates for one in listeners) else "thread.busy"
    parts["STACK"] = "(module, top, number)"
    if wrapped:
        parts["STACK"] = "(module, top, number, id(self))"
        parts["WRAPPED"] = WRAPPED.replace("CALL", call)
    parts["REMEMBER"] = "" if recompute else _remember(listeners)
    parts["PRE"], parts["POST"], parts["STOPPED"] = _sections(listeners, recompute=recompute, metered=metered)
    # In a recompute that has been asked already.
    lines = [line for line in BODY.splitlines() if not (recompute and ("graph_task" in line or " again(" in line))]
    return "\n".join(_filled(line, parts) for line in lines)


def remembers(listeners: tuple[Listener, ...]) -> bool:
    """Whether what a call returns is remembered, for any of these."""
    return any(one.remembers and one.hook in ("forward", "forwards") for one in listeners)


def _remember(listeners: tuple[Listener, ...]) -> str:
    """Write how a call is remembered where it is not handed over in a portion, which remembers it as well."""
    holding = [one.switch for one in listeners if one.remembers and one.hook == "forwards"]
    if not remembers(listeners):
        return ""
    return f"if not ({' or '.join(holding)}):\n{_indented(REMEMBER)}" if holding else REMEMBER


def _filled(line: str, parts: dict[str, str]) -> str:
    word = line.strip()
    if word in parts:
        indent = line[: len(line) - len(word)]
        return "\n".join(indent + part for part in parts[word].splitlines())
    return line.replace("CALL", parts["CALL"]).replace("BUSY", parts["BUSY"]).replace("STACK", parts["STACK"])


def _sections(listeners: tuple[Listener, ...], *, recompute: bool, metered: bool) -> tuple[str, str, str]:
    """Write what comes before the call, after it, and after a recompute that was ended early."""
    # A recompute must give what the first pass gave, so what changed that pass is called again, as torch's hooks are.
    heard = [one for one in listeners if not recompute or one.mutates or "recompute" in one.arguments]
    pre = [one for one in heard if one.hook in ("forward_pre", "root_forward_pre")]
    holding = [one.switch for one in heard if one.hook == "forwards"]
    post = [one for one in heard if one.hook in ("forward", "output_summary")]
    root = [one for one in heard if one.hook == "root_forward"]
    how = {"recompute": recompute, "metered": metered}
    before = _section(pre, **how)
    # Who is told of an output that a mutator has made must not conclude anything from the module's input.
    held = HOLD.replace("versions,", "(),") if any(one.mutates for one in post) else HOLD
    hold = f"if {' or '.join(holding)}:\n{_indented(held)}\n" if holding else ""
    suspecting = [] if recompute else [_is_suspecting(one, heard) for one in heard if one.hook == "suspect"]
    look = LOOK.replace("versions,", "(),") if any(one.mutates for one in post) else LOOK
    hold += f"if {' or '.join(suspecting)}:\n{_indented(look)}\n" if suspecting else ""
    after = _section(post, **how) + hold + _section(root, **how) if hold else _section(post + root, **how)
    post += root
    flows = any(one.hook in ("backward_pre", "backward") for one in listeners)
    if flows:
        before += "flow = begin(thread, args) if backward_on else None\n"
        after += f"if flow is not None:\n    output = end(module, args, output, flow, {recompute})\n"
    wanting = [*holding, *suspecting, *(one.switch for one in post if "versions" in one.arguments)]
    if wanting:
        before += f"versions = ()\nif {' or '.join(wanting)}:\n{_indented(VERSIONS)}\n"
    if not any(a in TIMES for one in post for a in one.arguments):
        return before, after, ""
    measured = ELAPSED + (HOOKED if flows else "") + OWN + (AGAIN if recompute else "")
    before += ("again_before = thread.again\n" if recompute else "") + CLOCK
    return before, measured + after, _stopped(post, measured, metered=metered) if recompute else ""


def _stopped(post: list[Listener], measured: str, *, metered: bool) -> str:
    """Write what tells of a recompute that torch ends as soon as it has what it needs: it has taken time as well."""
    heard = [one for one in post if not one.mutates and "output" not in one.arguments]
    told = _section(heard, recompute=True, metered=metered)
    return "if was_stopped(error):\n" + _indented(measured + told)


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def _section(listeners: list[Listener], *, recompute: bool, metered: bool) -> str:
    """Write the calls of one hook, all in one bracket: dynamo must not compile plugins that run under its callback.

    Where all of them are switched off, as on steps that are not sampled, there is no bracket either.
    """
    if not listeners:
        return ""
    lines = ["frame = no_frame(None)", "thread.busy = True", *(["mark = clock()"] if metered else [])]
    for quiet, group in _groups(listeners):
        alone = len(listeners) == 1  # its switch is asked before the bracket
        calls = [line for one in group for line in _call(one, recompute=recompute, metered=metered, alone=alone)]
        if quiet:
            switches = " or ".join(map(_is_on, group))
            calls = [
                f"if {switches}:",
                "    was, undo = is_grad_enabled(), None",
                "    try:",
                "        undo = enter()",
                "        if undo is not None:",
                "            set_grad_enabled(False)",
                *("            " + c for c in calls),
                "    finally:",
                "        if undo:",
                "            set_grad_enabled(was)",
                "            leave(undo)",
            ]
        lines += calls
    lines += ["thread.busy = False", "no_frame(frame)"]
    switches = " or ".join(map(_is_on, listeners))
    return "\n".join([f"if {switches}:", *("    " + line for line in lines)]) + "\n"


def _is_on(one: Listener) -> str:
    """Write whether a listener is called; of a model as a whole the outermost call alone is told of."""
    return f"({one.switch} and not is_nested)" if one.hook in ("root_forward_pre", "root_forward") else one.switch


def _is_suspecting(one: Listener, heard: list[Listener]) -> str:
    """Write whether a listener is to be told of a suspect: its plugin may have looked at all calls that are handed over."""
    forwards = next((other.switch for other in heard if other.hook == "forwards" and other.plugin == one.plugin), None)
    return one.switch if forwards is None else f"({one.switch} and not {forwards})"


def _groups(listeners: list[Listener]) -> list[tuple[bool, list[Listener]]]:
    groups: list[tuple[bool, list[Listener]]] = []
    for one in listeners:
        quiet = not one.mutates and any(a in TENSORS for a in one.arguments)
        if groups and groups[-1][0] == quiet:
            groups[-1][1].append(one)
        else:
            groups.append((quiet, [one]))
    return groups


def _call(one: Listener, *, recompute: bool, metered: bool, alone: bool) -> list[str]:
    names = {"inputs": "args", "recompute": str(recompute), "is_again": "top is not None and is_inside(top, module)"}
    call = f"{one.function}({', '.join(names.get(a, a) for a in one.arguments)})"
    body = (
        _mutation(one, call) if one.mutates else [f"if {call} is not None:", f"    stray({one.plugin}, {one.hook!r})"]
    )
    lines = ["try:", *("    " + line for line in body),
             "except BaseException as failure:", f"    fault({one.plugin}, {one.hook!r}, failure)",
             *([f"mark = charge({one.plugin}, mark)"] if metered else [])]  # fmt: skip
    return lines if alone else [f"if {_is_on(one)}:", *("    " + line for line in lines)]


def _mutation(one: Listener, call: str) -> list[str]:
    """Write what torch does with a hook's result: torch/nn/modules/module.py `_call_impl`, 2.13."""
    if one.hook in ("forward", "root_forward"):
        return [f"result = {call}", "if result is not None:", "    output = result"]
    if "kwargs" in one.arguments:
        return [f"result = {call}", "if result is not None:", "    args, kwargs = pair(result)"]
    return [f"result = {call}", "if result is not None:",
            "    args = result if isinstance(result, tuple) else (result,)"]  # fmt: skip


def is_inside(top: Top | None, module: Module) -> bool:
    """Whether a module is on a thread's stack of modules."""
    while top is not None:
        if top[0] is module:
            return True
        top = top[1]
    return False


def pair(result: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check what a forward_pre with `kwargs` returned, in torch's words.

    Raises:
        RuntimeError: it is not a pair.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    msg = f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}."
    raise RuntimeError(msg)


FILE = "<hookd plan>"


def compile_plan(text: str) -> CodeType:
    """Compile a plan's source; its file name keeps it apart in a traceback of the training code."""
    return compile(text, FILE, "exec")
