"""Draws docs/images/up.svg: what `kvps up` shows, recorded from a real run on this machine. Run by `make picture`."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from kvps_cli.train.progress import Display
from rich.console import Console

import kvps
from kvps.server import private_server

COMMAND = ["up", "digits", "--staleness", "2", "--slow", "w0=3x"]
FRAMES, FRAME_S, WIDTH = 14, 0.6, 84


def record() -> list[str]:
    """Run the command on a server of its own and record the display as SVG frames; the last holds the result."""
    frames: list[str] = []
    private_server.start()
    try:
        with kvps.connect() as store:
            run = subprocess.Popen([sys.executable, "-m", "kvps", *COMMAND], stdout=subprocess.PIPE, text=True)
            job = _first_job(store)
            display, units = Display(job), job.config.units
            while run.poll() is None:
                state = job.state()
                if state.units_done >= (len(frames) + 1) * units / (FRAMES + 1):
                    frames.append(_frame(display, len(frames), "\n"))
                job.access.client.wait({job.access.keys.commits: state.last_entry}, 50)
            said = run.stdout.read() if run.stdout else ""
            frames.append(_frame(display, len(frames), "\n".join(said.splitlines()[-2:])))
    finally:
        private_server.stop()
    return frames


def _first_job(store: kvps.Store) -> kvps.Job:
    while True:  # its name is listed before it is there
        with suppress(IndexError, kvps.JobNotFound):
            return store.job(store.jobs()[0])
        store.client.wait({"kvps:preflight:none": "$"}, 50)


def _frame(display: Display, number: int, result: str) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold green]$[/] kvps {' '.join(COMMAND)}\n", highlight=False)
    console.print(display.render())
    console.print(f"\n{result}", highlight=False)
    drawn = console.export_svg(title="kvps up", unique_id=f"kvps{number}")
    return re.sub(
        r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL
    )  # a picture in a README loads no fonts from elsewhere


def animated(frames: list[str]) -> str:
    """One SVG that shows the frames in turn and rests on the last; where nothing moves, the last is shown."""
    head = re.match(r"<svg[^>]*>", frames[-1])
    assert head
    seconds = FRAME_S * (len(frames) + 6)
    out, styles = [], []
    for i, frame in enumerate(frames):
        body = frame[frame.index(">") + 1 : frame.rindex("</svg>")]
        last = int(i == len(frames) - 1)
        begin = 100 * FRAME_S * i / seconds
        end = 100 * FRAME_S * (i + 1) / seconds if not last else 100
        styles.append(
            f"@keyframes f{i} {{ {'' if i == 0 else '0% { opacity: 0 } '}{begin:.2f}% {{ opacity: 1 }} "
            f"{end:.2f}% {{ opacity: {last} }} 100% {{ opacity: {last} }} }}\n"
            f".f{i} {{ animation: f{i} {seconds:.1f}s step-end infinite; opacity: {last} }}"
        )
        out.append(f'<g class="f{i}">{body}</g>')
    return f"{head.group()}<style>{chr(10).join(styles)}</style>{''.join(out)}</svg>\n"


def main() -> None:
    target = Path(__file__).parent / "images" / "up.svg"
    with tempfile.TemporaryDirectory(prefix="kvps-") as folder:
        os.environ["KVPS_RUNTIME_DIR"] = folder
        frames = record()
    target.parent.mkdir(exist_ok=True)
    target.write_text(animated(frames))
    print(f"{target}: {len(frames)} frames, {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
