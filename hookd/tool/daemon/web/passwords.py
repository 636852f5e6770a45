"""Basic authentication: bcrypt checks in a separate thread, one at a time, with a limit on guessing."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import ipaddress
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import bcrypt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_KNOWN = 100
"""Size of the cache of verified passwords; the same as exporter-toolkit's."""
MAX_WAITING = 64
"""Maximum number of queued checks; further requests are refused with 503."""
GUESSES, GUESSES_PER_S = 10, 1.0
"""Wrong passwords allowed per address in a burst, and the refill rate per second."""
MAX_ADDRESSES = 1000
_LONGEST = 72  # bytes that bcrypt reads; bcrypt 5 refuses more, Go and older versions ignore the rest
_COST = 10
_SALT = "hookdhookdhookdhookdhu"


class BusyError(Exception):
    """Too many passwords wait to be checked."""


class GuessingError(Exception):
    """There were too many wrong passwords from one address."""


class Passwords:
    """Checks passwords. For the event loop; hashing runs in its own thread."""

    def __init__(self, guesses: GuessLimit) -> None:
        self._guesses = guesses
        self._secret = secrets.token_bytes(32)
        self._known: dict[bytes, None] = {}
        self._thread = ThreadPoolExecutor(1, "password")
        self._hashing = asyncio.Lock()
        self._waiting = 0

    async def check(self, users: Mapping[str, str], name: str, password: str, address: str) -> bool:
        """Whether a password is correct. A cached password takes microseconds.

        Any other takes as long as one hash of each cost among the users, whatever name is given.

        Args:
            users: bcrypt hashes by user name.
            name: the user name given.
            password: the password given.
            address: the client's address.

        Raises:
            BusyError: too many checks are queued.
            GuessingError: there were too many wrong passwords from this address.
        """
        if self._knows(users, name, password):
            return True
        if self._waiting >= MAX_WAITING:
            raise BusyError
        self._waiting += 1
        try:
            async with self._hashing:
                return self._knows(users, name, password) or await self._hash(users, name, password, address)
        finally:
            self._waiting -= 1

    async def _hash(self, users: Mapping[str, str], name: str, password: str, address: str) -> bool:
        if not self._guesses.may(address):
            raise GuessingError
        costs = sorted({*map(_cost, users.values())}) or [_COST]
        hashed = users.get(name, "")
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._thread, _is_right, password, hashed, costs):
            self._guesses.count(address)
            return False
        while len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[self._token(name, hashed, password)] = None
        return True

    def _knows(self, users: Mapping[str, str], name: str, password: str) -> bool:
        return name in users and self._token(name, users[name], password) in self._known

    def _token(self, name: str, hashed: str, password: str) -> bytes:
        """Return a keyed digest of a password, so that a memory dump does not contain it."""
        return hmac.digest(self._secret, repr((name, hashed, password)).encode("utf-8", "replace"), "sha256")

    def close(self) -> None:
        """Shut down the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class GuessLimit:
    """Counts wrong passwords by address: a token bucket of GUESSES."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def may(self, address: str) -> bool:
        """Whether an address may try another password."""
        return self._of(_network(address)) >= 1

    def count(self, address: str) -> None:
        """Count a wrong password."""
        network = _network(address)
        left = self._of(network) - 1
        self._left.pop(network, None)
        while len(self._left) >= MAX_ADDRESSES:
            del self._left[next(iter(self._left))]
        self._left[network] = (left, self._clock())

    def _of(self, network: str) -> float:
        left, at = self._left.get(network, (float(GUESSES), self._clock()))
        return min(float(GUESSES), left + (self._clock() - at) * GUESSES_PER_S)


def credentials(header: str) -> tuple[str, str] | None:
    """Return name and password of an `Authorization` header; None if it is not valid Basic authentication."""
    scheme, _, rest = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    with contextlib.suppress(binascii.Error, ValueError):  # UnicodeDecodeError is one
        name, colon, password = base64.b64decode(rest.strip(), validate=True).decode().partition(":")
        return (name, password) if colon else None
    return None


def _is_right(password: str, hashed: str, costs: Sequence[int]) -> bool:
    """Whether a password matches a hash; "" stands for an unknown user, and matches none."""
    # One check of each cost, for every name: a difference in work or calls would reveal which names are users.
    word, is_right = password.encode("utf-8", "replace")[:_LONGEST], False
    for cost in costs:
        is_users = bool(hashed) and _cost(hashed) == cost
        try:
            is_right |= bcrypt.checkpw(word, (hashed if is_users else _nobodys(cost)).encode()) and is_users
        except ValueError:
            return False
    return is_right


def _cost(hashed: str) -> int:
    return int(hashed.split("$")[2])


def _nobodys(cost: int) -> str:
    """Return a hash that no password matches."""
    return f"$2b${cost:02}${_SALT}{'.' * 31}"


def _network(address: str) -> str:
    """Return the unit of rate limiting: an IPv4 address, or the /64 of an IPv6 address, as a host may use all of it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))
