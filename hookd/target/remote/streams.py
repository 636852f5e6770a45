"""Streams of plugins' records to tools, see `hookd/wire/stream.py`."""

from __future__ import annotations

import posix
from typing import TYPE_CHECKING, NamedTuple

from hookd.errors import ControlError
from hookd.wire.stream import StreamWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd.target.remote.control import Connection
    from hookd.wire.agent import Request

MOST_BYTES = 1 << 28
"""The largest memory of a stream that is mapped."""


class _Stream(NamedTuple):
    """A stream, and the connection of the tool that reads it.

    Attributes:
        number: from 1, in the order of opening.
    """

    writer: StreamWriter
    reader: Connection
    number: int


class Streams:
    """Writes records of plugins into the memory of the tools that read them: one tool for each plugin."""

    def __init__(self) -> None:
        self._by_plugin: dict[str, _Stream] = {}
        self._opened = 0

    def operations(self, asking: Callable[[], Connection]) -> dict[str, Callable[[Request], Mapping[str, object]]]:
        """Return the request that this answers; `asking` returns its connection."""
        return {"stream": lambda request: self._open(str(request.get("name")), asking())}

    def _open(self, plugin: str, connection: Connection) -> dict[str, object]:
        if not connection.files:
            raise ControlError("a stream needs the descriptor of its memory", reason="bad-request")
        file = connection.files.pop()
        try:
            known = self._by_plugin.get(plugin)
            if known is not None and known.reader is not connection and not known.reader.is_gone():
                raise ControlError(f"the records of plugin {plugin} are being read by process {known.reader.pid}", reason="busy",
                                   hint="Stop it first.")  # fmt: skip
            size = posix.fstat(file.number).st_size
            if size > MOST_BYTES:
                raise ControlError(f"a stream has at most {MOST_BYTES >> 20} MiB", reason="bad-request")
            try:
                writer = StreamWriter(file.number, size)
            except (OSError, ValueError) as exc:
                raise ControlError(f"the memory of the stream cannot be mapped: {exc}", reason="no-memory") from exc
        finally:
            file.close()
        self._opened += 1
        self._by_plugin[plugin] = _Stream(writer, connection, self._opened)
        return {}

    def reader_of(self, plugin: str) -> int:
        """Implement `Context.reader`."""
        stream = self._by_plugin.get(plugin)
        return 0 if stream is None else stream.number

    def send(self, plugin: str, record: bytes) -> bool:
        """Implement `Context.send`."""
        stream = self._by_plugin.get(plugin)
        return stream is not None and stream.writer.write(record)

    def left(self, connection: Connection) -> None:
        """End the streams of a connection that was closed; a thread that writes into one keeps the memory until it is done."""
        for plugin, stream in list(self._by_plugin.items()):
            if stream.reader is connection:
                del self._by_plugin[plugin]

    def clear(self) -> None:
        """End all streams."""
        self._by_plugin.clear()
