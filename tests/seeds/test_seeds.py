"""The rows S1 to S7 and S11 of hookd's founding document, each as a program of its own, plainly and under hookd.

The programs are in `programs/`, know nothing of hookd, and run in an environment without it. Observers must leave
their output as it is; a mutating plugin of `plugins/` must have the effect of torch's own hooks.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support import forked, tool
from tests.support.environment import bare_python, target_environment
from tests.support.processes import Process

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
OBSERVERS = ("nan:every=1", "timing", "activations:every=1", "tape")


@functools.cache
def plainly(name: str, *arguments: str) -> tuple[str, ...]:
    command = [bare_python(), HERE / "programs" / name, *arguments]
    with Process(command, env=target_environment(), popen=forked.start) as process:
        return tuple(process.finish())


def under_hookd(name: str, *arguments: str, plugins: tuple[str, ...] = OBSERVERS) -> tuple[list[str], list[str]]:
    """Return the program's own lines, and all lines, those of the `tape` plugin included."""
    program = [bare_python(), HERE / "programs" / name, *arguments]
    options = [*tool.plugin_options(plugins), "--plugin-dir", HERE / "plugins"]
    with tool.run(*options, program=program) as process:
        lines = process.finish()
    return [line for line in lines if not line.startswith("hookd| ")], lines


def events(lines: list[str], *kinds: str) -> list[tuple[str, str, str]]:
    """Return (event, module, what) from the tape's lines, of some kinds only."""
    found = [tuple(line.split(" ", 3)[1:]) for line in lines if line.startswith("hookd| ")]
    return [event for event in found if event[0] in kinds]


def test_s1_call_runs_hooks_in_order_and_a_backward_hook_anew_at_every_call():
    own, lines = under_hookd("s1.py")
    assert own == list(plainly("s1.py"))
    call = ["hookd| forward_pre #Layer.(root) 1+0", "pre-hook", "forward", "hook", "hookd| forward #Layer.(root) 1"]
    starts = [line if line.startswith("hookd|") else line.split(" ")[0] for line in lines]
    assert starts[:10] == call * 2
    backward = [line for line in starts[11:] if "backward" in line]
    assert backward.count("hookd| backward_pre #Layer.(root) g") == 2
    assert backward.count("hookd| backward #Layer.(root) g") == 2
    assert backward[0] == "hookd| backward_pre #Layer.(root) g", "known before the module's own backward"
    assert backward.index("hookd| backward #Layer.(root) g") < backward.index("hookd| backward_pre #Layer.(root) g", 1)


def test_s2_global_hooks_run_before_the_modules_own_and_ours_around_them():
    own, lines = under_hookd("s2.py")
    assert own == list(plainly("s2.py"))
    first = lines[: lines.index("without the global ones")]
    assert first[0] == "hookd| forward_pre #Layer.(root) 1+0"
    after = first.index("hookd| forward #Layer.(root) 1")
    assert first[1:after] == ["global pre-hook", "own pre-hook", "forward", "global hook", "own hook"]
    assert len(events(lines, "backward")) == 2


def test_s3_to_s6_observers_change_no_input_no_result_no_gradient_and_no_trace_and_tensor_hooks_see_the_same():
    programs = ("s3.py", "s4.py plain", "s5.py plain", "s6.py")
    own, _ = under_hookd("together.py", *programs)
    assert own == list(plainly("together.py", *programs))


def test_s3_a_mutating_plugins_result_replaces_inputs_and_outputs_as_torchs_hooks_do():
    own, _ = under_hookd("s3.py", plugins=("double", "shift"))
    assert own == list(plainly("s3.py", "torch"))
    assert own != list(plainly("s3.py"))


@pytest.mark.load
def test_s3_mutating_plugins_and_observers_together():
    own, lines = under_hookd("s3.py", plugins=(*OBSERVERS, "double", "shift"))
    assert own == list(plainly("s3.py", "torch"))
    assert events(lines, "forward")


@pytest.mark.load  # the next test has it with observers
@pytest.mark.parametrize("how", ["ones", "clamp"])
def test_s4_a_replaced_gradient_is_what_torchs_full_backward_hook_gives(how):
    own, _ = under_hookd("s4.py", "plain", plugins=(f"gradient:how={how}",))
    assert own == list(plainly("s4.py", "torch", how))
    assert not [line for line in own if " raised " in line]


def test_s4_a_replaced_gradient_with_every_observer_on():
    own, _ = under_hookd("s4.py", "plain", plugins=(*OBSERVERS, "gradient:how=clamp"))
    assert own == list(plainly("s4.py", "torch", "clamp"))


def test_s4_the_gradient_of_the_row_is_ones():
    own, _ = under_hookd("s4.py", "plain", plugins=("gradient",))
    assert own[0].startswith(f"linear_of_the_row [{[[1.0] * 10] * 3}, torch.Size([20, 10])")


def test_s5_a_replaced_output_gradient_is_what_a_tensor_hook_gives():
    own, _ = under_hookd("s5.py", "plain", plugins=("output",))
    assert own == list(plainly("s5.py", "torch"))
    assert own != list(plainly("s5.py", "plain"))


def test_s6_no_kind_of_trace_has_a_mutating_plugin_in_it():
    own, _ = under_hookd("s6.py", plugins=("everywhere",))
    assert graphs(own) == graphs(list(plainly("s6.py")))
    assert own != list(plainly("s6.py")), "the plugin should change all but the traces"


def graphs(lines: list[str]) -> dict[str, str]:
    """Return the sections of s6.py that show a graph or its code."""
    sections = dict(part.split("\n", 1) for part in "\n".join(lines).split("== ")[1:] if "\n" in part)
    traces = ("jit.trace", "jit.trace inlined", "jit.trace code", "jit.script", "fx", "make_fx", "export")
    return {title: sections[title] for title in traces}


def test_s7_a_result_of_any_shape_is_observed_and_left_as_it_is():
    own, lines = under_hookd("s7.py")
    assert own == list(plainly("s7.py"))
    reported: dict[str, list[list[str]]] = {}
    for _, module, what in events(lines, "backward_pre"):
        reported.setdefault(module, []).append(what.split())
    del reported["(root)"]
    # Outputs of nodes that do not lead to each other may come one by one: "g -", then "- g".
    whole = {
        k: "".join("g" if "g" in place else "-" for place in zip(*parts, strict=True)) for k, parts in reported.items()
    }
    one, two = ("tensor", "list", "nested", "itself"), ("tuple", "dict", "namedtuple", "dataclass")
    assert whole == dict.fromkeys(one, "g") | dict.fromkeys(two, "gg") | {"some": "-g"}


def test_s7_the_gradient_of_a_dict_output_can_be_replaced():
    own, _ = under_hookd("s7.py", plugins=("halve",))
    changed = {line.split(" ")[0]: line.rpartition("[")[2] for line in own}
    assert changed["dict"] == changed["tuple"] == changed["namedtuple"] == "2.5, 2.5]"
    assert changed["nested"] == changed["list"] == changed["some"] == "1.0, 1.0]"


def test_s11_lenet_reaches_every_layer_in_order_and_prints_the_same():
    own, lines = under_hookd("s11.py")
    assert own == list(plainly("s11.py"))
    layers = ["c1", "sig", "s2", "c3", "sig", "s2", "flatten", "f5", "f6", "f7"]
    assert [module for _, module, _ in events(lines, "forward_pre")] == ["(root)", *layers] * 2
    assert [module for _, module, _ in events(lines, "forward")] == [*layers, "(root)"] * 2
    assert [module for _, module, _ in events(lines, "backward_pre") if module != "(root)"] == layers[::-1] * 2
