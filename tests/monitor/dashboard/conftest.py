"""A real browser for the pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from helpers.paths import program_on_path
from playwright.sync_api import sync_playwright


@pytest.fixture(scope="module")  # Playwright holds the thread's event loop while it runs
def chromium() -> Iterator[Any]:
    """A headless Chromium. It needs one on the PATH; none is downloaded."""
    program = program_on_path("chromium", "chromium-browser", "google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of the browser that notes what its console says: a page without errors says nothing."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(90_000)
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))

    def open(self, url: str) -> Any:
        """Open a page and return it."""
        self.page.goto(url, wait_until="domcontentloaded")
        return self.page


def opened(chromium: Any, **context: Any) -> Iterator[Tab]:
    """A tab of a new browser; what its console said is an error at the end."""
    with closing(chromium.new_context(**context)) as browser:
        found = Tab(browser)
        yield found
    assert found.said == []


@pytest.fixture
def tab(chromium: Any) -> Iterator[Tab]:
    yield from opened(chromium, viewport={"width": 1280, "height": 900})
