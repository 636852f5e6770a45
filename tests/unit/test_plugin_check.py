"""`hookd plugin check` and `new`: each mistake is named with the author's file and line, and what to do about it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import textwrap

import pytest

from hookd.api import compatibility, hookspecs
from hookd.errors import HookdError, PluginError
from hookd.tool.check import attributes, blocking, names, packaging, signatures, source, types
from hookd.tool.cli import main
from tests.support import emulated, served

HEAD = """
from hookd import Plugin, hookimpl, Context, Module, Summary, TrainingError
from typing import Any
import logging, random, time, torch

class Widths(Plugin):
    name = "widths"

    @hookimpl
    def configure(self, context: Context) -> None:
        self.calls = context.counter("calls", "Calls.", ["module"])
"""


def subject(tmp_path, body, head=HEAD):
    """Return a plugin whose source is `head` and these methods, and the number of their first line."""
    file = tmp_path / "hookd_widths.py"
    file.write_text(head + textwrap.indent(textwrap.dedent(body), "    "))
    (one,) = source.subjects(str(file))
    return one, head.count("\n")


def found(check, tmp_path, body, head=HEAD):
    one, offset = subject(tmp_path, body, head)
    return [(problem.line - offset, problem.rule, problem.message, problem.fix) for problem in check(one)]


class TestSignatures:
    @pytest.mark.parametrize(
        ("body", "rule", "words"),
        [
            ("\n@hookimpl\ndef foward(self): ...", "hook", "did you mean 'forward'?"),
            ("\n@hookimpl\ndef forward(self, modul): ...", "argument", "did you mean 'module'?"),
            ("\n@hookimpl\ndef forward(self, module=None): ...", "default", "write module without a default"),
            ("\n@hookimpl(wrapper=True)\ndef forward(self): ...", "wrapper", "write @hookimpl alone"),
            ("\n@hookimpl\ndef forward(self, *modules): ...", "argument", "ask for what you need by name"),
            ("\n@hookimpl\ndef forward(module): ...", "argument", "write self first"),
            ("\n@hookimpl\ndef select(self): ...", "argument", "write def select(self, module)"),
            ("\n@hookimpl\nasync def forward(self): ...", "hook", "write def alone"),
            ("\n\ndef forward(self): ...", "hook", "write @hookimpl above it"),
        ],
    )
    def test_a_wrong_hook_is_named_with_its_line(self, tmp_path, body, rule, words):
        ((line, said, _, fix),) = found(signatures.problems, tmp_path, body)
        assert (line, said) == (3, rule)
        assert words in fix

    def test_what_an_observer_returns_is_found_on_its_line(self, tmp_path):
        body = "\n@hookimpl\ndef forward(self, output):\n    def inner():\n        return 1\n    return output\n"
        ((line, rule, *_),) = found(signatures.problems, tmp_path, body)
        assert (line, rule) == (6, "return")

    @pytest.mark.parametrize(
        "change",
        [
            "output.mul_(2)", "output += 1", "output[0] = 1", "output.data.zero_()", "torch.relu_(output)", "output.data = x",
            "torch.add(output, 1, out=output)", "F.relu(output, inplace=True)", "nn.init.zeros_(output)", "output.grad = None",
            "torch.Tensor.mul_(output, 2)", "torch._foreach_mul_([output], 2.0)", "o = output; o.add_(1)", "x, y = output; y *= 2",
            "output.detach().clamp_(0)", "output.view(-1)[0] = 1", "x = output[0].flatten(); x *= 2", "setattr(output, 'data', 1)",
            "output.__imul__(2)", "module.torch().weight.data.mul_(2)", "m = module.torch(); m.weight.zero_()",
        ],
    )  # fmt: skip
    def test_what_an_observer_changes_in_place_is_found_on_its_line(self, tmp_path, change):
        body = f"\n@hookimpl\ndef forward(self, module, output):\n    self.mine.add_(output)\n    {change}\n"
        ((line, rule, *_),) = found(signatures.problems, tmp_path, body)
        assert (line, rule) == (5, "changed")

    def test_what_is_changed_in_a_loop_is_found(self, tmp_path):
        body = "\n@hookimpl\ndef forward(self, output):\n    for t in tensors(output):\n        t.mul_(2)\n"
        ((line, rule, *_),) = found(signatures.problems, tmp_path, body)
        assert (line, rule) == (5, "changed")

    @pytest.mark.parametrize(
        "line",
        [
            "mine = output.clone(); mine.mul_(2)", "total = output.sum(); total += 1", "shape = output.shape; shape += (1,)",
            "self.mean.lerp_(output, 0.1)", "copied = output * 2; copied[0] = 1", "output = output.float() + 1; n = 0; n += len(output)",
            "self.seen[module.name] = output.mean()", "torch.add(output, 1, out=self.mine)", "F.relu(output)",
        ],
    )  # fmt: skip
    def test_what_changes_something_of_its_own_is_no_problem(self, tmp_path, line):
        assert not found(
            signatures.problems, tmp_path, f"\n@hookimpl\ndef forward(self, module, output):\n    {line}\n"
        )

    @pytest.mark.parametrize("attribute", ["sampled", "mutating"])
    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ('("forward", "forwrd")', "did you mean 'forward'?"),
            ('("root_forward")', "with the comma"),
            ("None", "with the comma"),
            ('{"forwrd": Rate()}', "did you mean 'forward'?"),
            ('{"forward": Rate(), **others}', ""),
            ('("forward", "backward")', ""),
            ('Other.sampled + ("forward",)', ""),
        ],
    )
    def test_what_should_name_hooks_and_does_not_is_found_on_its_line(self, tmp_path, attribute, value, words):
        problems = found(signatures.problems, tmp_path, f"\n{attribute} = {value}\n")
        assert [(line, rule) for line, rule, *_ in problems] == ([(2, "hook")] if words else [])
        assert all(words in fix for *_, fix in problems)

    @pytest.mark.parametrize("attribute", compatibility.FORMER)
    def test_an_attribute_that_has_been_replaced_is_found_on_its_line(self, tmp_path, attribute):
        ((line, rule, message, fix),) = found(signatures.problems, tmp_path, f'\n{attribute} = ("forward",)\n')
        assert (line, rule, fix) == (2, "api", compatibility.FORMER[attribute])
        assert f"attribute {attribute} any more" in message

    def test_a_mutator_may_return(self, tmp_path):
        body = "mutates = True\n@hookimpl\ndef forward(self, output):\n    return output\n"
        assert not found(signatures.problems, tmp_path, body)

    def test_a_missing_name_is_reported_at_the_class(self, tmp_path):
        ((line, rule, *_),) = found(signatures.problems, tmp_path, "", HEAD.replace('name = "widths"', "other = 1"))
        assert rule == "name"
        assert HEAD.splitlines()[HEAD.count("\n") + line - 1].startswith("class Widths")

    def test_another_api_is_reported(self, tmp_path):
        ((_, rule, message, _),) = found(signatures.problems, tmp_path, 'requires_api = "9.0"\n')
        assert rule == "api"
        assert "needs API 9.0" in message


class TestAttributes:
    def test_reading_an_attribute_of_the_training_is_warned_of_on_its_line(self, tmp_path):
        body = "\n@hookimpl\ndef forward(self, module):\n    torch_module = module.torch()\n    torch_module.weight.norm()\n"
        ((line, rule, message, fix),) = found(attributes.problems, tmp_path, body)
        assert (line, rule) == (5, "attribute")
        assert "torch_module.weight" in message
        assert "hookd.peek" in fix

    def test_reading_it_through_hookd_is_fine(self, tmp_path):
        body = "\n@hookimpl\ndef forward(self, module):\n    torch_module = module.torch()\n    hookd.peek(torch_module, 'weight')\n"
        assert not found(attributes.problems, tmp_path, body)


class TestBlocking:
    @pytest.mark.parametrize(
        "call",
        ["x.item()", "x.norm().cpu()", "x.tolist()", "time.sleep(1)", "open('f')", "print(1)", "logging.info('x')",
         "self.lock.acquire()", "requests.get('x')", "random.random()", "torch.randn(3)", "torch.cuda.synchronize()"],
    )  # fmt: skip
    def test_it_is_found_in_a_hot_hook_on_its_line(self, tmp_path, call):
        body = f"\n@hookimpl\ndef forward(self, module, output):\n    x = output\n    {call}\n"
        ((line, rule, _, fix),) = found(blocking.problems, tmp_path, body)
        assert line == 5
        assert rule in ("blocking", "random")
        assert fix

    @pytest.mark.parametrize(
        ("more", "call"),
        [
            ("from time import sleep as nap", "nap(1)"),
            ("import urllib.request as web", "web.urlopen('http://x')"),
            ("from pathlib import Path", "Path('f').open()"),
            ("from torch import randn as draw", "draw(3)"),
        ],
    )
    def test_it_is_found_by_whatever_name_it_was_imported(self, tmp_path, more, call):
        body = f"\n@hookimpl\ndef forward(self):\n    {call}\n"
        ((line, _, message, _),) = found(blocking.problems, tmp_path, body, f"{more}\n{HEAD}")
        assert line == 4
        assert call.partition("(")[0] in message or ".open" in call

    def test_it_is_found_in_what_the_hook_calls(self, tmp_path):
        body = "\n@hookimpl\ndef forward(self, output):\n    self.look(output)\n\ndef look(self, x):\n    x.item()\n"
        ((line, _, message, _),) = found(blocking.problems, tmp_path, body)
        assert line == 7
        assert message.startswith("look, which forward calls,")

    @pytest.mark.parametrize("hook", ["configure", "tick", "succeed", "unconfigure", "select", "forward"])
    @pytest.mark.parametrize(
        ("call", "rule"),
        [
            ("random.random()", "random"),
            ("torch.randn(3)", "random"),
            ("torch.distributed.all_reduce(self.x)", "ranks"),
            ("torch.distributed.broadcast_object_list([1])", "ranks"),
        ],
    )
    def test_what_no_hook_may_do_is_found_in_each(self, tmp_path, hook, call, rule):
        body = f"\n@hookimpl\ndef {hook}(self):\n    {call}\n"
        assert [(line, said) for line, said, *_ in found(blocking.problems, tmp_path, body)] == [(4, rule)]

    @pytest.mark.parametrize(
        "call", ["work.wait()", "self.thread.join()", "t.join(timeout=2)", "later.result()", "os.system('ls')", "torch.save(1, 'f')"]
    )  # fmt: skip
    @pytest.mark.parametrize(("hook", "rules"), [("forward", ["blocking"]), ("tick", [])])
    def test_what_waits_for_others_is_found_in_a_hot_hook_alone(self, tmp_path, call, hook, rules):
        body = f"\n@hookimpl\ndef {hook}(self):\n    {call}\n"
        assert [rule for _, rule, *_ in found(blocking.problems, tmp_path, body)] == rules

    @pytest.mark.parametrize(
        "call",
        [
            "torch.rand(3, generator=self.own)",
            "numpy.random.default_rng(0)",
            "', '.join(['a'])",
            "os.path.join('a', 'b')",
            "torch.distributed.get_rank()",
        ],
    )
    def test_what_is_its_own_or_waits_for_nobody_is_not(self, tmp_path, call):
        assert not found(blocking.problems, tmp_path, f"\n@hookimpl\ndef forward(self):\n    {call}\n")

    def test_a_lock_that_is_entered_is_found(self, tmp_path):
        body = "\n@hookimpl\ndef forward(self):\n    with self.lock:\n        pass\n"
        assert [line for line, *_ in found(blocking.problems, tmp_path, body)] == [4]

    def test_a_method_that_a_hook_calls_is_the_plugins_own_before_that_of_its_base(self, tmp_path):
        base = "class Base(Plugin):\n    @hookimpl\n    def forward(self, output):\n        self.see(output)\n\n"
        base += "    def see(self, output):\n        pass\n\n"
        head = f'from hookd import Plugin, hookimpl\n\n{base}class Widths(Base):\n    name = "widths"\n'
        ((line, rule, message, _),) = found(
            blocking.problems, tmp_path, "\ndef see(self, output):\n    output.item()\n", head
        )
        assert (line, rule) == (3, "blocking")
        assert message.startswith("see, which forward calls, calls ")

    @pytest.mark.parametrize(
        "body",
        [
            "\n@hookimpl\ndef tick(self):\n    open('f')\n",  # not hot
            "\n@hookimpl\ndef step_post(self):\n    self.context.aside(lambda: open('f'))\n",  # in another thread
            "\n@hookimpl\ndef forward(self, output):\n    output.item()  # hookd: may block\n",
            "\n@hookimpl\ndef forward(self):\n    self.random = random.Random(0)\n",
        ],
    )
    def test_what_is_done_elsewhere_or_knowingly_is_not(self, tmp_path, body):
        assert not found(blocking.problems, tmp_path, body)


class TestMetrics:
    @pytest.mark.parametrize(
        ("declaration", "words"),
        [
            ('counter("calls_total", "x", [])', "_total"),
            ('gauge("load_ms", "x", [])', "base units"),
            ('gauge("size_mb", "x", [])', "bytes"),
            ('gauge("hookd_widths_x", "x", [])', "hookd_"),
            ('gauge("Loss", "x", [])', "not a valid metric name"),
            ('gauge("loss", "", [])', "no help"),
            ('gauge("loss_gauge", "x", [])', "type in its name"),
            ('gauge("loss", "x", ["step"])', "unbounded values"),
            ('gauge("loss", "x", ["rank"])', "hookd's own"),
        ],
    )
    def test_a_wrong_name_or_label_is_found_on_its_line(self, tmp_path, declaration, words):
        body = f"\ndef more(self, context):\n    self.more_ = context.{declaration}\n"
        one, offset = subject(tmp_path, body)
        (problem,) = names.declared(one.file)
        assert problem.line - offset == 3
        assert words in problem.message + problem.fix

    @pytest.mark.skipif(not served.has("promtool"), reason="promtool is not installed")
    def test_what_promtool_says_of_a_name_is_said_here(self):
        suffixes = "milliseconds ms weeks gibibytes kilobits bits percent fahrenheit kelvin miles kilojoules calories milliamperes".split()
        suffixes += "kilograms pounds counter gauge histogram summary total count sum bucket info seconds bytes ratio loss".split()
        text = "".join(f"# HELP hookd_x_{end} X.\n# TYPE hookd_x_{end} gauge\nhookd_x_{end} 1\n" for end in suffixes)
        told = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
        )
        refused = {line.split()[0].removeprefix("hookd_x_") for line in told.stderr.splitlines()}
        assert "milliseconds" in refused
        ours = {end for end in suffixes if list(names.lint("gauge", f"a_{end}", "A.", [], file="x.py", line=1))}
        assert refused <= ours <= {*refused, "percent"}

    @pytest.mark.parametrize(("labels", "warnings"), [(["a", "b", "c", "d"], 0), (["a", "b", "c", "d", "e"], 1)])
    def test_more_than_four_labels_are_warned_of(self, labels, warnings):
        reported = list(names.lint("gauge", "loss", "A loss.", labels, file="x.py", line=1))
        assert [problem.is_warning for problem in reported] == [True] * warnings

    def test_the_wrong_number_of_label_values_is_found(self, tmp_path):
        one, offset = subject(tmp_path, "\n@hookimpl\ndef forward(self, module):\n    self.calls.labels().inc()\n")
        (problem,) = names.declared(one.file)
        assert (problem.line - offset, problem.rule) == (4, "label")

    def test_a_metric_that_is_counted_without_its_labels_is_found(self, tmp_path):
        one, offset = subject(tmp_path, "\n@hookimpl\ndef forward(self):\n    self.calls.inc()\n")
        (problem,) = names.declared(one.file)
        assert (problem.line - offset, problem.rule) == (4, "label")
        assert problem.fix == "write self.calls.labels(…).inc(…)"

    def test_a_metric_that_was_never_declared_is_found_with_the_nearest(self, tmp_path):
        one, _ = subject(tmp_path, "\n@hookimpl\ndef forward(self, module):\n    self.call.labels(module.name).inc()\n")
        (problem,) = names.declared(one.file)
        assert problem.fix == "did you mean 'calls'?"


class TestImports:
    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("import psutil", "compiled code"),  # it has a .so, and is here because hookd needs it
            ("from nowhere.at_all import x", "declared dependency"),
            ("import hookd.target", "not part of hookd's public API"),
        ],
    )
    def test_what_does_not_come_along_is_reported_on_its_line(self, tmp_path, line, words):
        ((_, rule, message, fix),) = found(packaging.problems, tmp_path, "", f"{line}\n{HEAD}")
        assert rule == "import"
        assert words in message
        assert fix

    def test_what_is_there_is_not(self, tmp_path):
        guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\n"
        head = f"import json, torch.nn, hookd_widths\n{guarded}{HEAD}"
        assert not found(packaging.problems, tmp_path, "", head)

    @pytest.mark.parametrize("test", ["if not TYPE_CHECKING:\n", "if TYPE_CHECKING:\n    pass\nelse:\n"])
    def test_an_import_that_only_type_checkers_skip_is_found(self, tmp_path, test):
        head = f"from typing import TYPE_CHECKING\n{test}    import mine\n{HEAD}"
        (tmp_path / "mine.py").write_text("")
        one, _ = subject(tmp_path, "", head)
        (problem,) = packaging.problems(one)
        assert problem.message == "mine.py is not carried, only hookd_widths.py is"

    @pytest.mark.parametrize("beside", ["mine.py", "mine/__init__.py"])
    def test_what_lies_beside_a_single_file_is_not_carried(self, tmp_path, beside):
        (tmp_path / beside).parent.mkdir(exist_ok=True)
        (tmp_path / beside).write_text("")
        one, _ = subject(tmp_path, "", f"import mine\n{HEAD}")
        (problem,) = packaging.problems(one)
        assert (problem.line, problem.is_warning) == (1, False)
        assert problem.message == f"{beside.partition('/')[0]} is not carried, only hookd_widths.py is"
        assert "into a package" in problem.fix


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """mypy's cache, which these tests share."""
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield home


class TestTypes:
    def test_annotations_that_are_not_the_hooks_are_found(self, tmp_path, cache):
        body = """
        @hookimpl
        def forward(self, module: str, elapsed_ns: int) -> None:
            self.calls.labels(module).inc()

        @hookimpl
        def backward(self, module: Module, elapsed_ns: list[int]) -> None:
            self.calls.labels(module.nme).inc()

        @hookimpl
        def select(self, module: Module) -> int:
            return 1

        @hookimpl
        def step_post(self, elapsed_ns: int) -> int:
            return 1
        """
        reported = {(line, message) for line, _, message, _ in found(types.problems, tmp_path, body)}
        assert {line for line, _ in reported} == {3, 7, 8, 11, 15}
        text = "\n".join(message for _, message in sorted(reported)).replace('"', "")
        assert "Argument module to forward of Widths has incompatible type Module; expected str" in text
        assert "Argument elapsed_ns to backward of Widths has incompatible type int; expected list[int]" in text
        assert "Module has no attribute nme" in text

    def test_a_mypy_that_does_not_end_is_reported(self, tmp_path, cache, monkeypatch):
        monkeypatch.setattr(types, "TIMEOUT_S", 0.01)
        with pytest.raises(HookdError, match=r"types of widths for longer than 0\.01 s"):
            found(types.problems, tmp_path, "")

    def test_any_subset_of_the_arguments_in_any_order_is_right(self, tmp_path, cache):
        body = """
        @hookimpl
        def forward(self, output: Any, module: Module) -> None:
            self.calls.labels(module.name).inc()

        @hookimpl
        def step_post(self) -> None: ...

        @hookimpl
        def output_summary(self, summary: "Summary", module: Module) -> None: ...

        @hookimpl
        def succeed(self, predecessor: "Widths") -> None: ...

        @hookimpl
        def select(self, module: Module) -> bool:
            return True
        """
        assert not found(types.problems, tmp_path, body)


class TestApiVersion:
    @pytest.mark.parametrize(("required", "is_served"), [("", True), ("1.0", True), ("1.1", True), ("1.2", False), ("2.0", False), ("0.9", False)])  # fmt: skip
    def test_the_same_major_and_no_greater_minor_version_is_served(self, monkeypatch, required, is_served):
        monkeypatch.setattr(compatibility, "API_VERSION", "1.1")
        if is_served:
            compatibility.check("widths", required)
        else:
            with pytest.raises(PluginError, match="needs API"):
                compatibility.check("widths", required)

    def test_what_is_no_version_is_refused(self):
        with pytest.raises(PluginError, match="must be like"):
            compatibility.check("widths", "one")


class TestSources:
    def test_hooks_of_base_classes_in_other_files_count(self, tmp_path):
        package = tmp_path / "hookd_two"
        package.mkdir()
        (package / "base.py").write_text(
            "from hookd import Plugin, hookimpl\n\nclass Base(Plugin):\n    @hookimpl\n    def foward(self): ...\n"
        )
        (package / "__init__.py").write_text('from hookd_two.base import Base\n\nclass Two(Base):\n    name = "two"\n')
        (one,) = source.subjects(str(package))
        (problem,) = signatures.problems(one)
        assert (problem.file, problem.line) == (str(package / "base.py"), 5)

    def test_problems_on_the_same_line_of_two_files_are_both_reported(self, tmp_path):
        package = tmp_path / "hookd_two"
        package.mkdir()
        body = "    @hookimpl\n    def {}(self, output):\n        output.item()\n"
        (package / "base.py").write_text(
            "from hookd import Plugin, hookimpl\n\nclass Base(Plugin):\n" + body.format("forward_pre")
        )
        (package / "__init__.py").write_text(
            "from hookd_two.base import Base, hookimpl\n\nclass Two(Base):\n"
            + body.format("forward")
            + '    name = "two"\n'
        )
        (one,) = source.subjects(str(package))
        places = [(problem.file, problem.line) for problem in blocking.problems(one)]
        assert sorted(places) == [(str(package / "__init__.py"), 6), (str(package / "base.py"), 6)]

    def test_what_is_no_python_is_reported_with_its_line(self, tmp_path):
        (tmp_path / "broken.py").write_text("x = 1\ndef (:\n")
        with pytest.raises(PluginError, match=r"broken\.py:2: not valid Python"):
            source.subjects(str(tmp_path / "broken.py"))

    def test_of_a_folder_the_others_are_found_all_the_same(self, tmp_path, capsys):
        (tmp_path / "hookd_broken.py").write_text("x = 1\ndef (:\n")
        package = tmp_path / "hookd_torn"
        package.mkdir()
        (package / "__init__.py").write_text("(")
        (tmp_path / "hookd_sound.py").write_text(
            'from hookd import Plugin, hookimpl\n\nclass Sound(Plugin):\n    name = "sound"\n\n'
            "    @hookimpl\n    def step_post(self): ...\n"
        )
        assert main(["plugin", "check", str(tmp_path), "--static", "--json"]) == 1
        reported = json.loads(capsys.readouterr().out)["plugins"]
        broken = [
            (one["file"], one["line"]) for report in reported for one in report["problems"] if one["rule"] == "source"
        ]
        assert broken == [(str(package / "__init__.py"), 1), (str(tmp_path / "hookd_broken.py"), 2)]
        assert [report["plugin"] for report in reported] == ["", "", "sound"]
        assert main(["plugin", "check", str(tmp_path), "--static"]) == 1
        reported = capsys.readouterr()
        assert "hookd_broken.py:2: error: not valid Python" in reported.out
        assert "hookd_broken.py: no trial training was run; fix these problems first" in reported.err
        assert "sound: no problems found" in reported.err

    def test_where_there_is_none_it_says_so(self, tmp_path):
        with pytest.raises(PluginError, match="there is no plugin in"):
            source.subjects(str(tmp_path))
        with pytest.raises(PluginError, match="no file, folder or installed plugin 'nonsense'"):
            source.subjects("nonsense")

    @pytest.mark.parametrize(
        "name", ["activations", "coverage", "drift", "gradclip", "memory", "nan", "optimizer", "timing"]
    )
    def test_those_that_come_with_hookd_have_nothing_to_mend(self, name):
        (one,) = source.subjects(name)
        problems = [*signatures.problems(one), *blocking.problems(one), *packaging.problems(one)]
        problems += [problem for file in one.files for problem in names.declared(file)]
        assert not [problem for problem in problems if not problem.is_warning]


class TestCommands:
    def test_new_writes_a_package_and_overwrites_nothing(self, tmp_path, capsys):
        assert main(["plugin", "new", "spread", "--dir", str(tmp_path), "--json"]) == 0
        reported = json.loads(capsys.readouterr().out)
        home = tmp_path / "hookd-spread"
        assert {str(path) for path in home.rglob("*") if path.is_file()} == set(reported["files"])
        assert "$" not in "".join(path.read_text() for path in home.rglob("*.py"))
        ast.parse((home / "hookd_spread" / "__init__.py").read_text())
        assert (home / "hookd_spread" / "py.typed").exists()
        assert main(["plugin", "new", "spread", "--dir", str(tmp_path)]) == 2
        assert "already exists" in capsys.readouterr().err

    @pytest.mark.parametrize("more", [[], ["--daemon"]])
    def test_what_a_new_package_declares_is_there(self, tmp_path, more):
        assert main(["plugin", "new", "spread", "--dir", str(tmp_path), *more]) == 0
        home = tmp_path / "hookd-spread"
        declared = (home / "pyproject.toml").read_text()
        (package,) = re.findall(r'^packages = \["(.+)"\]$', declared, re.MULTILINE)
        assert (home / package / "__init__.py").is_file(), "the wheel is made of it"
        entries = re.findall(r'^spread = "(.+):(.+)"$', declared, re.MULTILINE)
        assert len(entries) == 1 + len(more)
        for module, name in entries:
            path = home.joinpath(*module.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert f"class {name}(" in file.read_text()

    @pytest.mark.parametrize("name", ["run", "step_norm", "Spread", "1st", "class", "nan", "größe", "../x"])
    def test_new_refuses_names_that_cannot_be(self, tmp_path, capsys, name):
        assert main(["plugin", "new", name, "--dir", str(tmp_path)]) == 2
        assert "error" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_check_prints_findings_as_a_compiler_does(self, tmp_path, capsys, monkeypatch):
        one, _ = subject(tmp_path, "\n@hookimpl\ndef foward(self): ...\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(types, "is_possible", lambda: False)
        assert main(["plugin", "check", str(one.file), "--static"]) == 1
        out = capsys.readouterr().out.splitlines()
        assert out[0] == "hookd_widths.py:14: error: there is no hook 'foward' [hook]"
        assert out[1].strip() == "did you mean 'forward'?"

    def test_check_says_where_there_is_no_torch(self, tmp_path, capsys, monkeypatch):
        one, _ = subject(tmp_path, "")
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\nexit 79\n")
        python.chmod(0o755)
        monkeypatch.setattr(types, "is_possible", lambda: False)
        assert main(["plugin", "check", str(one.file), "--python", str(python)]) == 1
        assert "has no torch" in capsys.readouterr().err

    @emulated.lacks("spawn")
    def test_check_tells_what_it_has_found_where_a_trial_fails(self, tmp_path, capsys, monkeypatch):
        one, _ = subject(tmp_path, "", f"import psutil\n{HEAD}")
        monkeypatch.setattr(types, "is_possible", lambda: False)
        assert main(["plugin", "check", str(one.file), "--python", str(tmp_path / "none")]) == 1
        said = capsys.readouterr()
        assert "psutil has compiled code" in said.out
        assert "no problems found" not in said.err
        assert "No such file" in said.err


def test_every_hook_has_annotations_that_mypy_can_read():
    for hook in hookspecs.HOOKS:
        annotations = getattr(hookspecs, hook).__annotations__
        assert "return" in annotations
        assert all(isinstance(one, str) for one in annotations.values())


DAEMON_HEAD = """
from typing import Any
from hookd import PluginError
from hookd.serving import DaemonPlugin, Metrics, Panel, Reading, hookimpl

class Spread(DaemonPlugin):
    name = "spread"

"""


class TestDaemonHalf:
    @pytest.mark.parametrize(
        ("body", "rule", "words"),
        [
            ("\n@hookimpl\ndef colect(self): ...", "hook", "did you mean 'collect'?"),
            ("\n@hookimpl\ndef forward(self): ...", "hook", ""),
            ("\n@hookimpl\ndef collect(self, rank): ...", "argument", "did you mean 'ranks'?"),
            ("\n@hookimpl\ndef collect(self, run=None): ...", "default", "write run without a default"),
            ("\n@hookimpl(wrapper=True)\ndef close(self): ...", "wrapper", "write @hookimpl alone"),
            ("\n@hookimpl\ndef incident(self, **incident): ...", "argument", "ask for what you need by name"),
        ],
    )
    def test_a_wrong_hook_is_named_with_its_line(self, tmp_path, body, rule, words):
        ((line, said, _, fix),) = found(signatures.problems, tmp_path, body, DAEMON_HEAD)
        assert (line, said) == (3, rule)
        assert words in fix

    @pytest.mark.parametrize(
        ("reported", "words"),
        [
            ('gauge("spread_ms", "x", 1.0)', "base units"),
            ('gauge("ranks_count", "x", 1.0)', "belongs to histograms"),
            ('counter("falls_total", "x", 1.0, {"what": "a"})', "_total"),
            ('gauge("loss", "", 1.0)', "no help"),
            ('gauge("loss", "x", 1.0, {"run": run})', "hookd's own"),
            ('gauge("loss", "x", value=1.0, labels={"step": "1"})', "unbounded values"),
            ('gauge("loss", "x", 1.0, {"rank": ranks[0].rank})', ""),
        ],
    )
    def test_a_wrong_metric_is_found_on_its_line(self, tmp_path, reported, words):
        body = f"\n@hookimpl\ndef collect(self, run, ranks, metrics):\n    metrics.{reported}\n"
        one, offset = subject(tmp_path, body, DAEMON_HEAD)
        problems = [
            (problem.line - offset, problem.message + problem.fix) for problem in names.declared(one.file, one.side)
        ]
        assert [line for line, _ in problems] == ([4] if words else [])
        assert all(words in text for _, text in problems)

    def test_annotations_that_are_not_the_hooks_are_found(self, tmp_path, cache):
        body = """
        @hookimpl
        def collect(self, ranks: list[int], metrics: Metrics) -> None:
            metrics.gauge("ranks", "Ranks.", "two")

        @hookimpl
        def web_panel(self) -> str:
            return ""

        @hookimpl
        def target_lost(self, reason: str, target: Reading) -> None: ...
        """
        reported = {line: message for line, _, message, _ in found(types.problems, tmp_path, body, DAEMON_HEAD)}
        assert set(reported) == {3, 4, 7}
        assert "expected" in reported[3]

    def test_a_half_that_is_right_has_nothing_to_mend(self, tmp_path):
        one, _ = subject(tmp_path, "\n@hookimpl\ndef collect(self, ranks): ...\n", DAEMON_HEAD)
        assert one.side == "daemon"
        assert not [*signatures.problems(one), *packaging.problems(one)]


@pytest.fixture
def both(tmp_path):
    """Write a package of both sides; a test supplies the beginning of a file."""

    def make(**heads):
        package = tmp_path / "hookd_two"
        package.mkdir()
        files = {
            "__init__": "",
            "shared": "",
            "target": 'import torch\nfrom hookd import Plugin\n\nclass Two(Plugin):\n    name = "two"\n',
            "daemon": 'from hookd.serving import DaemonPlugin, hookimpl\n\nclass Other(DaemonPlugin):\n    name = "two"\n',
        }
        for name, text in files.items():
            (package / f"{name}.py").write_text(f"{heads.get(name, '')}\n{text}")
        return {one.side: one for one in source.subjects(str(tmp_path))}

    return make


class TestBothHalves:
    @staticmethod
    def reported(subjects):
        return {
            (side, problem.file.rpartition("/")[2], problem.line): problem.message
            for side, one in subjects.items()
            for problem in packaging.problems(one)
        }

    def test_each_side_is_checked_against_its_own_rules(self, both):
        sides = both(daemon="from hookd_two import shared", target="from . import shared", shared="import json")
        assert {side: one.file.name for side, one in sides.items()} == {"target": "target.py", "daemon": "daemon.py"}
        assert not self.reported(sides)
        assert not [file for file in sides["daemon"].files if file.name == "target.py"]

    @pytest.mark.parametrize(
        ("heads", "places"),
        [
            ({"target": "from hookd.serving import Reading"}, {("target", "target.py", 1)}),
            ({"target": "from hookd import serving"}, {("target", "target.py", 1)}),
            ({"target": "from .daemon import Other"}, {("target", "daemon.py", 2)}),
            ({"__init__": "from hookd_two.target import Two"}, {("daemon", "target.py", 2)}),
            ({"__init__": "import torch"}, {("daemon", "__init__.py", 1)}),
            ({"daemon": "from hookd_two.shared import x", "shared": "def x():\n    import torch.nn"}, {("daemon", "shared.py", 2)}),
            ({"daemon": "from hookd import hookimpl"}, {("daemon", "daemon.py", 1)}),
            ({"daemon": "from hookd.tool.daemon.plugins import host"}, {("daemon", "daemon.py", 1)}),
            ({"daemon": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"}, set()),
            ({"target": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hookd.serving import Reading\n"}, set()),
        ],
    )  # fmt: skip
    def test_what_belongs_to_the_other_half_is_found_where_it_is_imported(self, both, heads, places):
        assert set(self.reported(both(**heads))) == places

    def test_a_metric_that_both_declare_is_found(self, both):
        body = "def tell(metrics):\n    metrics.{}('calls', 'Calls.', {})\n"
        sides = both(target=body.format("counter", []), daemon=body.format("gauge", "1.0, {'rank': '0'}"))
        (problem,) = names.twice(sides["daemon"], sides["target"])
        assert (problem.file.rpartition("/")[2], problem.line) == ("daemon.py", 2)
        assert "'calls' is also declared by the plugin in targets" in problem.message


class TestDaemonPlugin:
    def check(self, tmp_path, capsys, body, *words, head=DAEMON_HEAD):
        one, offset = subject(tmp_path, body, head)
        code = main(["plugin", "check", str(one.file), "--json", *words])
        (report,) = json.loads(capsys.readouterr().out)["plugins"]
        return (
            code,
            report,
            [(p["line"] - offset, p["rule"], p["message"]) for p in report["problems"] if not p["is_warning"]],
        )

    @pytest.fixture(autouse=True)
    def _untyped(self, monkeypatch):
        monkeypatch.setattr(types, "is_possible", lambda: False)

    def test_what_its_hooks_raise_and_tell_is_found_with_the_authors_line(self, tmp_path, capsys):
        body = """
        @hookimpl
        def configure(self, options):
            self.unit = options["unit"]

        @hookimpl
        def collect(self, ranks, metrics):
            metrics.gauge(f"spread_{self.unit}", "Spread.", 1.0)

        @hookimpl
        def target_lost(self, target, reason):
            self.ends[target.pid] = reason

        @hookimpl
        def web_panel(self, runs):
            return 1

        @hookimpl
        def register_commands(self):
            return [1]
        """
        code, report, problems = self.check(tmp_path, capsys, body, "--daemon-option", "unit=ms")
        assert (code, report["is_run"], report["side"]) == (1, True, "daemon")
        assert set(report["daemon_hooks"]) == {"collect", "configure", "register_commands", "target_lost", "web_panel"}
        assert (12, "raised", "target_lost: AttributeError: 'Spread' object has no attribute 'ends'") in problems
        rest = " ".join(message for _, _, message in problems)
        assert "'spread_ms' is in ms; metrics are in base units" in rest
        assert "web_panel returned int" in rest
        assert "register_commands returned a int, not a command" in rest
        assert len(problems) == 4

    def test_what_it_refuses_is_reported_with_what_to_do(self, tmp_path, capsys):
        body = "\n@hookimpl\ndef configure(self, options):\n    raise PluginError('spread: it needs an address')\n"
        _, report, ((_, rule, message),) = self.check(tmp_path, capsys, body)
        assert (rule, "it needs an address" in message) == ("refused", True)
        assert "--daemon-option" in report["problems"][-1]["fix"]

    def test_torch_is_refused_there_also_where_no_source_shows_it(self, tmp_path, capsys):
        body = "\n@hookimpl\ndef collect(self):\n    __import__('torch')\n"
        _, _, ((line, rule, message),) = self.check(tmp_path, capsys, body)
        assert (line, rule) == (4, "raised")
        assert "the daemon never imports torch" in message


def test_bench_says_that_there_is_no_half_for_targets(tmp_path, capsys):
    one, _ = subject(tmp_path, "", DAEMON_HEAD)
    assert main(["plugin", "bench", str(one.file)]) == 2
    assert "no plugin for targets" in capsys.readouterr().err


class TestLoading:
    """A plugin that a person loads is checked as far as its source says, before the target is touched."""

    MUTATES = "\n@hookimpl\ndef forward(self, output):\n    output.mul_(0.5)"
    NOBODY = str(1 << 22)  # no process has this number
    COMMANDS = (
        ["attach", "-p", "widths", NOBODY],
        ["plugin", "enable", NOBODY, "widths"],
        ["plugin", "reload", NOBODY, "widths"],
    )

    @pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
    def test_a_faulty_plugin_is_refused(self, tmp_path, capsys, command):
        subject(tmp_path, self.MUTATES)
        assert main([*command, "--plugin-dir", str(tmp_path), "--json"]) == 2
        error = json.loads(capsys.readouterr().out)
        error = error[0] if isinstance(error, list) else error
        assert error["reason"] == "faulty"
        assert "forward changes 'output' in place, but an observer must not" in error["error"]
        assert "hookd_widths.py:15" in error["error"]
        assert "--force" in error["hint"]

    @pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
    def test_with_force_it_is_not_checked(self, tmp_path, capsys, command):
        subject(tmp_path, self.MUTATES)
        main([*command, "--plugin-dir", str(tmp_path), "--json", "--force"])
        assert "no-such-process" in capsys.readouterr().out
