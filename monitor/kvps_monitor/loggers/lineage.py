"""Which rows of an earlier process belong to a job: its own, and those of the job that it was restored from."""

from __future__ import annotations

from kvps.errors import InvalidSetting
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.parsing import JOB_ID, Fields
from kvps.protocol.keys import check_name


class Lineage:
    """What a logger must know of a job that goes on: `mark` names the job in a file, `NAME.ID`."""

    def __init__(self, mark: str, begin: int, origin: str) -> None:
        self.mark = mark
        self._begin = begin
        self._origin = origin

    @classmethod
    def of(cls, job: Job) -> Lineage:
        """Return the lineage of a job. Raises JobNotFound, CorruptData."""
        state, origin = job.state(), ""
        if state.begin.version:
            origin = (
                f"{job.name}."  # the log's first entry may be in a file: then its name alone says what it continues
            )
            if (page := LogStream(job.access).page("0-0")) and page[0][1].get("kind") == "restore":
                f = Fields(page[0][1], "the log's first entry")
                origin = f"{f.name('job')}.{f.matching('id', *JOB_ID)}"
        return cls(f"{check_name('job', job.name)}.{job.id}", state.begin.version, origin)

    def belongs(self, mark: str) -> bool:
        """Return whether rows of the job that `mark` names are this job's, or of the one that it continues."""
        return mark == self.mark or self._continues(mark)

    def kept(self, mark: str, last: int) -> int:
        """Return up to which version the rows of `mark`, of which `last` is the newest, are still of this job.

        Those of a restored job after its checkpoint were trained and lost. Raises InvalidSetting for another job's.
        """
        if mark == self.mark:
            return last
        if not self._continues(mark):
            raise InvalidSetting(f"it has the rows of another job ({mark}): name another file or directory")
        return min(last, self._begin)

    def _continues(self, mark: str) -> bool:
        return bool(self._origin) and (mark == self._origin or (self._origin[-1] == "." and mark[:-8] == self._origin))
