"""Takes docs/images/dashboard.png: what `kvps dashboard` shows of a real run on this machine, in a headless Chromium.

Run by `make picture`.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from kvps.server import private_server

COMMAND = ["up", "digits", "--staleness", "2", "--slow", "w2=2x", "--batch-size", "1024", "--lr", "0.002"]
COMMAND += ["--epochs", "40000", "--quiet"]
SIZE = {"width": 1180, "height": 1136}
COLOURS = 256  # of the picture, which is mostly flat
LONG_ENOUGH = 14_000  # ms, so that the timeline is full


def shoot() -> bytes:
    """Start a run and a dashboard on a server of their own; return the page of the job as PNG."""
    kvps = [sys.executable, "-m", "kvps"]
    private_server.start()
    run = subprocess.Popen([*kvps, *COMMAND], stdout=subprocess.DEVNULL)
    shown = subprocess.Popen([*kvps, "dashboard", "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert shown.stdout
        url = shown.stdout.readline().rpartition(" ")[2].strip()
        with sync_playwright() as playwright:
            program = shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = browser.new_page(viewport=SIZE)
            page.goto(url)
            page.get_by_role("link", name="digits", exact=True).click()
            page.locator(".rows .pill", has_text="computing").first.wait_for()
            page.wait_for_timeout(LONG_ENOUGH)
            return bytes(page.screenshot())
    finally:
        for process in (shown, run):
            process.terminate()
            process.wait()
        private_server.stop()


def main() -> None:
    """Write the picture, with so few colours that it is small."""
    target = Path(__file__).with_name("images") / "dashboard.png"
    with tempfile.TemporaryDirectory(prefix="kvps-p-") as folder:
        os.environ["KVPS_RUNTIME_DIR"] = folder
        shot = shoot()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(
        COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
    ).save(target, optimize=True)


if __name__ == "__main__":
    main()
