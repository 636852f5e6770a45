"""Convert between user names and uids."""

from __future__ import annotations

import pwd

from hookd.errors import UsageError


def user_name(uid: int) -> str:
    """Return the name of a user, the uid if it has no name here (a container's), "" for an unknown user."""
    if uid < 0:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_named(user: str) -> int:
    """Return the uid of a user given by name or number.

    Raises:
        UsageError: there is no such user here.
    """
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        if user.isascii() and user.isdecimal():
            return int(user)
    raise UsageError(f"there is no user '{user}' here", reason="no-such-user", hint="Give the number of the user.")
