"""Debian's Chromium, driven by Playwright; never a browser that Playwright fetched."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

ARGUMENTS = (
    "--no-sandbox",
    "--disable-lcd-text",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
)
WHY = "Chromium is not installed here (Debian: apt install chromium)"


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser; skip the test if there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip(WHY)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page of the daemon in a window of its own, and all that went wrong there.

    Args:
        browser: in which.
        url: of the daemon.
        options: of the window, as `Browser.new_context` has them.
    """

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console",
            lambda reported: self.wrong.append(reported.text) if reported.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def go(self, path: str) -> Page:
        """Open a page of the daemon."""
        self.page.goto(self.url + path)
        return self.page

    def strangers(self) -> list[str]:
        """Return the requests that went to another place than the daemon."""
        return [one for one in self.requests if not one.startswith((self.url + "/", "data:"))]

    def close(self) -> None:
        self.context.close()
