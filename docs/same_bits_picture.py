"""Draws docs/images/same-bits.svg: the sha256 of the weights of four real runs with different workers. Run by
`make picture`."""

from __future__ import annotations

import io
import re
from pathlib import Path

from chaos.arena import arena
from rich.console import Console
from rich.table import Table
from same_bits.job import expected_digits
from same_bits.ways import Run, train_processes

WIDTH = 108
IMAGE = Path(__file__).parent / "images" / "same-bits.svg"


def trained() -> list[tuple[str, Run]]:
    """Train the digits with 1, 2 and 4 workers, and with 4 of which one is killed every half second."""
    with arena(seed=4, loud=False) as here, here.server() as store:
        runs = [
            (f"{n} worker{'s' * (n > 1)}", train_processes(here, store, f"of-{n}", n, 1, "Redis")) for n in (1, 2, 4)
        ]
        fire = train_processes(here, store, "fire", 4, 1, "Redis", every_s=0.5)
    workers, aggregators = fire.kills["worker"], fire.kills["aggregator"]
    return [*runs, (f"4 workers; killed: {workers} workers, {aggregators} aggregators", fire)]


def drawn(rows: list[tuple[str, Run]]) -> str:
    """Return the table of runs as an SVG."""
    table = Table("run", "sha256 of the weights", box=None, pad_edge=False, header_style="bold")
    for label, run in rows:
        assert not run.problems, run.problems
        table.add_row(
            label, f"[green]{run.sha256[:32]}…[/]" if run.sha256 == expected_digits() else f"[red]{run.sha256}[/]"
        )
    table.add_row("[dim]one loop in NumPy[/]", f"[dim]{expected_digits()[:32]}…[/]")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print("digits in rounds of 6 units: the same bits, whoever trains\n", highlight=False)
    console.print(table)
    svg = console.export_svg(title="make picture", unique_id="kvps")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # a picture in a README loads no fonts


if __name__ == "__main__":
    IMAGE.write_text(drawn(trained()) + "\n")
