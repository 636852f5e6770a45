"""Read `_Py_DebugOffsets`, the table of field offsets that CPython 3.14 and newer publishes for other processes.

Source: Include/internal/pycore_debug_offsets.h and pycore_runtime_structs.h of CPython 3.14 and 3.15.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.tool.inject.interpreter import DEBUG_COOKIE, RUNTIME

if TYPE_CHECKING:
    from hookd.tool.inject.interpreter import Interpreter
    from hookd.tool.linux.memory import Memory

    Layout = tuple[tuple[str, str], ...]

_FINAL = 0xF0
_MOST_INTERPRETERS = 4096
_HEADER = struct.Struct("<8sQQ")  # the cookie, the version, `free_threaded`
_FLAGS = 24
"""Bytes between the table and the field `_finalizing`: five ints and their padding."""
_MOST_PATH = 1 << 16
_STATE: Layout = (
    ("runtime_state", "size finalizing interpreters_head"),
    (
        "interpreter_state",
        (
            "size id next threads_head threads_main gc imports_modules sysdict builtins ceval_gil gil_runtime_state "
            "gil_runtime_state_enabled gil_runtime_state_locked gil_runtime_state_holder code_object_generation "
            "tlbc_generation"
        ),
    ),
)
_CODE: Layout = (
    ("interpreter_frame", "size previous executable instr_ptr localsplus owner stackpointer tlbc_index"),
    (
        "code_object",
        (
            "size filename name qualname linetable firstlineno argcount localsplusnames localspluskinds "
            "co_code_adaptive co_tlbc"
        ),
    ),
    ("pyobject", "size ob_type"),
)
_VALUES: Layout = (
    ("tuple_object", "size ob_item ob_size"),
    ("list_object", "size ob_item ob_size"),
    ("set_object", "size used table mask"),
    ("dict_object", "size ma_keys ma_values"),
    ("float_object", "size ob_fval"),
    ("long_object", "size lv_tag ob_digit"),
    ("bytes_object", "size ob_size ob_sval"),
)
_END: Layout = (
    ("gen_object", "size gi_name gi_iframe gi_frame_state"),
    ("llist_node", "next prev"),
    (
        "debugger_support",
        (
            "eval_breaker remote_debugger_support remote_debugging_enabled debugger_pending_call debugger_script_path "
            "debugger_script_path_size"
        ),
    ),
)
_LAYOUTS: dict[tuple[int, int], Layout] = {
    (3, 14): (
        *_STATE,
        ("thread_state", "size prev next interp current_frame thread_id native_thread_id datastack_chunk status"),
        *_CODE,
        ("type_object", "size tp_name tp_repr tp_flags"),
        *_VALUES,
        ("unicode_object", "size state length asciiobject_size"),
        ("gc", "size collecting"),
        *_END,
    ),
    (3, 15): (
        *_STATE,
        (
            "thread_state",
            (
                "size prev next interp current_frame base_frame last_profiled_frame last_profiled_frame_seq thread_id "
                "native_thread_id datastack_chunk status holds_gil gil_requested current_exception exc_state"
            ),
        ),
        ("err_stackitem", "exc_value"),
        *_CODE,
        ("type_object", "size tp_name tp_repr tp_flags tp_basicsize tp_dictoffset"),
        ("heap_type_object", "size ht_cached_keys"),
        *_VALUES,
        ("unicode_object", "size state length asciiobject_size compactunicodeobject_size"),
        ("gc", "size collecting frame generation_stats_size generation_stats"),
        *_END,
    ),
}
FIRST, NEWEST = min(_LAYOUTS), max(_LAYOUTS)


@dataclass(frozen=True)
class Table:
    """The table of one process, read by the layout of its version, or by the newest known layout.

    Attributes:
        address: of the runtime, which begins with the table.
        version: major and minor, according to the table.
        is_final: whether the table is of a final release; pre-releases change their layout at any time.
        at: the values by `group.field`.
        size: of the layout, in bytes.
        layout: version of the layout by which the table was read.
    """

    address: int
    version: tuple[int, int]
    is_final: bool
    at: dict[str, int]
    size: int
    layout: tuple[int, int]

    @property
    def own_size(self) -> int:
        """Return the table's actual size in bytes, derived from the offset of the field that follows it."""
        return self.at["runtime_state.finalizing"] - _FLAGS

    def misplaced(self) -> str:
        """Return the name of a used field that lies outside its object, "" if there is none."""
        at = self.at
        support = at["debugger_support.remote_debugger_support"]
        path = support + at["debugger_support.debugger_script_path"]
        path_size = at["debugger_support.debugger_script_path_size"]
        fields = (
            ("interpreters_head", at["runtime_state.interpreters_head"] + 8, "runtime_state"),
            ("id", at["interpreter_state.id"] + 8, "interpreter_state"),
            ("next", at["interpreter_state.next"] + 8, "interpreter_state"),
            ("threads_main", at["interpreter_state.threads_main"] + 8, "interpreter_state"),
            ("remote_debugging_enabled", at["debugger_support.remote_debugging_enabled"] + 4, "interpreter_state"),
            ("interp", at["thread_state.interp"] + 8, "thread_state"),
            ("eval_breaker", at["debugger_support.eval_breaker"] + 8, "thread_state"),
            (
                "debugger_pending_call",
                support + at["debugger_support.debugger_pending_call"] + 4,
                "thread_state",
            ),
            ("debugger_script_path", path + path_size, "thread_state"),
        )
        if not 0 < path_size <= _MOST_PATH:
            return "debugger_script_path_size"
        return next((name for name, end, owner in fields if end > at[f"{owner}.size"]), "")


def read(memory: Memory, python: Interpreter) -> Table | None:
    """Read the table; None if the interpreter has none, or one without remote debugging.

    Raises:
        OSError: the memory cannot be read.
    """
    address = python.symbols.get(RUNTIME)
    if address is None or python.version < FIRST:
        return None
    cookie, number, _ = _HEADER.unpack(memory.read(address, _HEADER.size))
    if cookie != DEBUG_COOKIE:
        return None
    layout = min(python.version, NEWEST)
    names = [f"{group}.{field}" for group, fields in _LAYOUTS[layout] for field in fields.split()]
    size = _HEADER.size + 8 * len(names)
    values = struct.unpack(f"<{len(names)}Q", memory.read(address + _HEADER.size, 8 * len(names)))
    version = (number >> 24) & 0xFF, (number >> 16) & 0xFF
    is_final = number & _FINAL == _FINAL
    return Table(address, version, is_final, dict(zip(names, values, strict=True)), size, layout)


def main_thread(memory: Memory, table: Table) -> tuple[int, int]:
    """Return the addresses of the main interpreter and of its main thread; 0 for each that is missing.

    Raises:
        OSError: the memory cannot be read.
    """

    def pointer(address: int) -> int:
        return int.from_bytes(memory.read(address, 8), "little")

    interpreter = pointer(table.address + table.at["runtime_state.interpreters_head"])
    for _ in range(_MOST_INTERPRETERS):  # the newest comes first; the main interpreter has id 0
        if not interpreter or not pointer(interpreter + table.at["interpreter_state.id"]):
            break
        interpreter = pointer(interpreter + table.at["interpreter_state.next"])
    thread = pointer(interpreter + table.at["interpreter_state.threads_main"]) if interpreter else 0
    is_its_own = bool(thread) and pointer(thread + table.at["thread_state.interp"]) == interpreter
    return interpreter, thread if is_its_own else 0
