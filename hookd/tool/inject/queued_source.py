"""The code of `hookd/target/boot/queued.py` as a target gets it: short enough for the first page of the mailbox."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import hookd
from hookd.tool.inject import mailbox


class _Stripped(ast.NodeTransformer):
    """Removes docstrings, annotations and imports from `typing`; replaces the names that the module declares.

    Attributes:
        declared: the names. Those of `mailbox` get their values, the others become placeholders such as `@PID@`.
    """

    def __init__(self) -> None:
        self.declared: set[str] = set()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        assert isinstance(node.target, ast.Name)
        if node.value is None:
            self.declared.add(node.target.id)
            return None
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_ImportFrom(self, _: ast.ImportFrom) -> None:
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.declared:
            return node
        value = getattr(mailbox, node.id, None)
        return ast.Name(f"@{node.id}@", node.ctx) if value is None else ast.Constant(value)


@functools.cache
def _template() -> str:
    """Return `hookd/target/boot/queued.py` as short as the page of the mailbox asks for, with placeholders for the values of each attach."""
    source = Path(hookd.__file__).with_name("target").joinpath("boot", "queued.py").read_text("utf-8")
    short = ast.unparse(ast.fix_missing_locations(_Stripped().visit(ast.parse(source))))
    lines = [line for line in short.split("\n") if line]
    return "\n".join(" " * ((len(line) - len(line.lstrip())) // 4) + line.lstrip() for line in lines)


def code(nspid: int, token: int, wait_s: float) -> str:
    """Return the code for a mailbox in memory; `at_address` completes it."""
    return _fill(nspid, token, wait_s).replace("@FILE@", "None").replace("@NAMES@", "()")


def file_code(nspid: int, token: int, wait_s: float, path: str, script: str) -> str:
    """Return the code for a mailbox in a file.

    Args:
        nspid: pid of the target in its own namespace.
        token: one-time number.
        wait_s: how long the target's thread waits for the data.
        path: of the mailbox, as the target sees it; the code unlinks it.
        script: path of the code's own file, likewise; the code unlinks it.
    """
    opening = f"posix.open({path!r},posix.O_RDWR|posix.O_CLOEXEC|posix.O_NOFOLLOW)"
    filled = _fill(nspid, token, wait_s).replace("@FILE@", opening).replace("@NAMES@", repr((path, script)))
    return filled.replace("@BOX@", "0")


def _fill(nspid: int, token: int, wait_s: float) -> str:
    filled = _template().replace("@PID@", str(nspid)).replace("@OURS@", str(token))
    return filled.replace("@WAIT_S@", f"{wait_s:.3f}")


def statement(source: str) -> bytes:
    """Return the C string for PyRun_SimpleString: one expression, so that no name remains in `__main__`."""
    return f"__import__('builtins').exec({source!r},{{}})\n\0".encode()


def at_address(text: bytes, address: int) -> bytes:
    """Insert the address of its mailbox into a statement. Called during the stop."""
    return text.replace(b"@BOX@", b"%d" % address)
