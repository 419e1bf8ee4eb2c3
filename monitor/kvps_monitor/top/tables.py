"""The tables of workers and shards. A table of 1,000 workers makes only the rows that are in sight."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.widgets import DataTable

from kvps_monitor.top import rows
from kvps_monitor.views import ShardView, WorkerView

_EMPTY = Text("")
_SCROLLBAR = 1


class _Table(DataTable[Text]):
    """A table whose columns have the widths of their titles, with one character between two."""

    def __init__(self, id: str) -> None:
        # The bar and the states keep their colours under the cursor.
        super().__init__(id=id, cursor_type="row", cell_padding=0, cursor_foreground_priority="renderable")
        self._titles: list[Text] = []

    def set_shape(self, titles: Sequence[Text], number: int) -> None:
        """Have these columns, and so many rows."""
        if list(titles) != self._titles:
            self._titles = list(titles)
            self.clear(columns=True)
            for title in titles[:-1]:
                self.add_column(title, width=title.cell_len + 1)
            for title in titles[-1:]:
                self.add_column(title, width=title.cell_len)
        while self.row_count > number:
            self.remove_row(self.ordered_rows[-1].key)
        for _ in range(number - self.row_count):
            self.add_row(*[_EMPTY] * len(titles))

    def set_row(self, number: int, cells: Sequence[Text]) -> None:
        """Show these cells in a row."""
        row = self.ordered_rows[number].key
        for column, cell in zip(self.ordered_columns, cells, strict=True):
            self.update_cell(row, column.key, cell)


class WorkerTable(_Table):
    """The workers of a job, in the order in which they are given. The cursor stays on its worker when the order
    changes; at the top it stays at the top."""

    def __init__(self) -> None:
        super().__init__("workers")
        self._workers: list[WorkerView] = []
        self._columns: list[rows.Column] = []
        self._slowest = 0.0

    @property
    def chosen(self) -> WorkerView | None:
        """The worker that the cursor is on; None if there is none."""
        return self._workers[self.cursor_row] if self.cursor_row < len(self._workers) else None

    def show(self, workers: list[WorkerView], slowest_first: bool) -> None:
        """Show these workers."""
        before = self.chosen if self.cursor_row else None
        self._workers, self._slowest = rows.ordered(workers, slowest_first), rows.slowest_ms(workers)
        self._shape()
        names = [w.worker for w in self._workers]
        if before and before.worker in names:
            self.move_cursor(row=names.index(before.worker), scroll=False)
        self._fill()

    def _shape(self) -> None:
        self._columns = rows.worker_columns(max(1, self.size.width - _SCROLLBAR), self._workers)
        self.set_shape([column.head for column in self._columns], len(self._workers))

    def _fill(self) -> None:
        first = max(0, int(self.scroll_y))
        for number in range(first, min(first + self.size.height + 1, len(self._workers))):
            worker = self._workers[number]
            self.set_row(number, [column.shown(worker, self._slowest) for column in self._columns])

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Fill the rows that come into sight."""
        super().watch_scroll_y(old_value, new_value)
        self._fill()

    def on_resize(self, _: events.Resize) -> None:
        """Show the columns that fit now."""
        cursor = self.cursor_row
        self._shape()
        self.move_cursor(row=cursor)
        self._fill()


class ShardTable(_Table):
    """The shards of a job."""

    can_focus = False

    def __init__(self) -> None:
        super().__init__("shards")
        self.show_cursor = False
        self._shards: list[ShardView] = []

    def show(self, shards: list[ShardView]) -> None:
        """Show these shards."""
        self._shards = shards
        self.on_resize()

    def on_resize(self) -> None:
        """Show the columns that fit now."""
        titles, cells = rows.shard_table(self._shards, max(1, self.size.width - _SCROLLBAR))
        self.set_shape(titles, len(cells))
        for number, row in enumerate(cells):
            self.set_row(number, row)
