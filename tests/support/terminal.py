"""A terminal as a person has one: a shell in tmux, of a given size, whose screen can be read as text."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from tests.support.environment import tool_environment
from tests.support.processes import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self


class Terminal:
    """A shell in a tmux server of its own. `environment` is added to that of a tool."""

    def __init__(self, directory: Path, width: int = 80, height: int = 24, **environment: str) -> None:
        self._socket = directory / "tmux.sock"
        shell = ("env", "PS1=$ ", "bash", "--norc", "--noprofile")
        size = ("-x", str(width), "-y", str(height))
        self.tmux("-f", "/dev/null", "new-session", "-d", *size, *shell, env=tool_environment(**environment))
        self.wait("$")

    def tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return done.stdout

    def type(self, line: str) -> None:
        """Type a line into the shell."""
        self.tmux("send-keys", "-l", line)
        self.press("Enter")

    def press(self, *keys: str) -> None:
        """Press keys, by tmux's names of them."""
        self.tmux("send-keys", *keys)

    def screen(self) -> list[str]:
        """Return the lines as they stand there."""
        return self.tmux("capture-pane", "-p").splitlines()

    def wait(self, wanted: str | Callable[[list[str]], object]) -> list[str]:
        """Wait until a text is on the screen, or a condition holds for its lines; return the lines."""
        seen: list[str] = []

        def is_there() -> bool:
            seen[:] = self.screen()
            return wanted in "\n".join(seen) if isinstance(wanted, str) else bool(wanted(seen))

        wait_until(is_there, what=lambda: f"{wanted} on the screen:\n" + "\n".join(seen))
        return seen

    def in_front(self) -> str:
        """Return the name of the program that has the terminal."""
        return self.tmux("display-message", "-p", "#{pane_current_command}").strip()

    def wait_for_shell(self) -> None:
        """Wait until the last command has ended or is stopped: it may read or discard input that is typed before."""
        wait_until(lambda: self.in_front() == "bash", what=lambda: "\n".join(["the shell", *self.screen()]))

    def resize(self, width: int, height: int) -> None:
        self.tmux("resize-window", "-x", str(width), "-y", str(height))

    def close(self) -> None:
        """End the shell and all that runs in it."""
        self.tmux("kill-server")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


is_there = shutil.which("tmux") is not None
