"""`hookd snapshot PID`: show the current models of a target, module by module."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from hookd.tool.cli import options, output
from hookd.wire.module_names import depth as depth_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.wire.model import Models, ModuleDescription, TensorRow

LINES = 500
"""Lines shown without --all."""
SEEN = {
    "unheard": "no plugin listens",
    "unlearnt": "not learnt yet",
    "left_out": "left out: large model",
    "never_called": "never called",
    "container": "",
}
"""Descriptions of states whose name in JSON is not readable."""
KIND_WIDTH, SIZE_WIDTH = 24, 7


@click.command(short_help="Show the current models of a target.")
@click.argument("pid", type=options.Pid())
@click.option(
    "-d", "--depth", type=click.IntRange(min=0), metavar="N", help="Show modules up to N levels below a root."
)
@click.option("-a", "--all", "everything", is_flag=True, help=f"Show all lines, not only the first {LINES}.")
@options.json
def snapshot(*, pid: int, depth: int | None, everything: bool, as_json: bool) -> None:
    """Show the current models of a target: modules, parameters, buffers, hooks, and what hookd observes of each.

    The agent in the target answers. It reads no tensor data, and no device has to synchronize.
    """
    from hookd.tool.attach.modules import snapshot as look

    result = look(pid)
    if as_json:
        output.emit(result)
        return
    if not result["modules"]:
        output.say("no module has been called since the attach")
        return
    usual = _usual(result["modules"])
    lines = [line for module in result["modules"] if _is_shown(module, depth) for line in _module(module, usual)]
    limit = None if everything else LINES
    for line in lines[:limit]:
        click.echo(line)
    if limit is not None and len(lines) > limit:
        click.echo(
            f"... {len(lines) - limit} more lines; use --all to show them, or --depth N to show only the upper modules"
        )
    click.echo()
    for line in _totals(result):
        click.echo(output.wrap(line))
    if usual:
        click.echo(
            output.wrap(
                f"plugins that listen to a module unless it names others: {', '.join(map(output.plain, usual))}"
            )
        )


def _usual(modules: list[ModuleDescription]) -> tuple[str, ...]:
    """Return the most frequent set of plugins among modules that have any; () if none has."""
    counted = Counter(tuple(map(str, module["plugins"])) for module in modules if module["plugins"])
    return counted.most_common(1)[0][0] if counted else ()


def _is_shown(module: ModuleDescription, depth: int | None) -> bool:
    return depth is None or depth_of(module["name"]) <= depth


def _module(module: ModuleDescription, usual: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for the module itself, and one for each of its tensors and hooks."""
    depth = depth_of(module["name"])
    indent = "  " * min(depth, 12)
    label = module["name"] if depth == 0 else module["name"].rpartition(".")[2]
    inside = " (in the wrapper above)" if module["wrapped"] else ""
    seen = SEEN.get(module["seen"], module["seen"].replace("_", " "))
    listening = tuple(map(str, module["plugins"]))
    plugins = f": {', '.join(listening)}" if listening and listening != usual else ""
    mode = ", eval mode" if module["training"] is False else ""
    kind = f"{module['class']}{inside}"
    yield _line(f"{indent}{label}", kind, "", f"{seen}{plugins}{mode}")
    for tensor in module["parameters"]:
        frozen = "frozen" if tensor.get("requires_grad") is False else ""
        yield _tensor(indent, tensor, frozen)
    for tensor in module["buffers"]:
        yield _tensor(indent, tensor, "buffer" if tensor.get("persistent") else "buffer, not in the state_dict")
    for hook in module["hooks"]:
        on = f" on {hook['on']}" if "on" in hook else ""
        times = f" ({hook.get('count')}x)" if hook.get("count", 1) != 1 else ""
        text = f"{indent}  hook {hook.get('kind')}{on}: {hook.get('function')}{times}"
        yield output.shorten(output.plain(text), output.columns())
    if module.get("left_out"):
        yield f"{indent}  ({module['left_out']} more tensors or hooks are not listed)"


def _tensor(indent: str, tensor: TensorRow, note: str) -> str:
    name = f"{indent}  .{tensor.get('name')}"
    if "same_as" in tensor:
        return _line(name, f"is {tensor['same_as']}", "", "shared")
    if tensor.get("uninitialized"):
        return _line(name, "not initialized yet", "", note)
    shape = "x".join(map(str, tensor.get("shape") or ())) or "scalar"
    where = f" {tensor['device']}" if tensor.get("device") not in (None, "cpu") else ""
    kind = f"{tensor.get('dtype', '?')} {shape}{where}" if "unknown" not in tensor else str(tensor["unknown"])
    notes = [note, str(tensor.get("class") or ""), str(tensor.get("layout") or "")]
    if "global_shape" in tensor:
        notes.append("part of " + "x".join(map(str, tensor["global_shape"])))
    return _line(name, kind, count(tensor.get("elements")), ", ".join(filter(None, notes)))


def _line(name: str, kind: str, size: str, rest: str) -> str:
    """Format a line in columns.

    Names and notes share the width that the other columns leave. Without a size, the kind gets the size's columns.
    """
    width = output.columns()
    room = max(18, (width - KIND_WIDTH - SIZE_WIDTH) // 2)
    left_for_kind = KIND_WIDTH if size else KIND_WIDTH + SIZE_WIDTH
    name, kind, rest = (output.plain(text) for text in (name, kind, rest))
    sized = f"{output.shorten(kind, left_for_kind):<{left_for_kind}}{size:>{SIZE_WIDTH if size else 0}} "
    left = f"{output.shorten(name, room - 1):<{room}}{sized}"
    return (left + output.shorten(rest, max(8, width - len(left)))).rstrip()


def _totals(result: Models) -> Iterator[str]:
    totals = result["totals"]
    frozen = totals["parameters"] - totals["trainable"]
    yield (
        f"{totals['modules']} modules; {count(totals['parameters'])} parameters, of which {count(totals['trainable'])} require "
        f"gradients{f' and {count(frozen)} frozen' if frozen else ''}; {count(totals['buffers'])} elements in buffers; "
        f"{size(totals['bytes'])}"
    )
    for row in totals["by"]:
        yield f"  {row['kind']} of {output.plain(row['dtype'])} on {output.plain(row['device'])}: {size(row['bytes'])}"
    if totals["unknown"]:
        yield f"tensors without a size yet, or of unknown size: {totals['unknown']}"
    if result["is_cut"]:
        yield "the target has more modules than one request returns; this is the first part"


def count(value: int | None) -> str:
    """Format a number of elements: 12345678 is `12.3 M`."""
    if value is None:
        return "?"
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return str(value)


def size(value: int) -> str:
    """Format a number of bytes with binary prefixes."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value} B"
