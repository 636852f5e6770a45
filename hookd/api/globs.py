"""Options that select names by patterns, with a report of patterns that match nothing."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase


class Globs:
    """The patterns of one option, separated by `|`: `encoder.*|head`."""

    def __init__(self, option: str, text: str) -> None:
        self.option = option
        self._patterns = [pattern for pattern in text.split("|") if pattern]
        self._unmatched = list(self._patterns)
        self._seen: dict[str, bool] = {}

    @property
    def seen(self) -> bool:
        """Whether `match` was called for any name."""
        return bool(self._seen)

    def match(self, name: str) -> bool:
        """Whether a pattern matches `name`."""
        known = self._seen.get(name)
        if known is None:
            matching = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
            self._unmatched = [pattern for pattern in self._unmatched if pattern not in matching]
            known = self._seen[name] = bool(matching)
        return known

    def unmatched(self, what: str) -> list[str]:
        """Return a message for each pattern that has matched no `what` ("module") so far, with similar names."""
        messages = []
        for pattern in self._unmatched if self.seen else ():
            near = difflib.get_close_matches(pattern, self._seen, 1) or sorted(self._seen)[:3]
            messages.append(f"{self.option}={pattern} matches no {what}; there is {', '.join(near)}")
        return messages
