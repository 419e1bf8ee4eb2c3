"""The pages and the API of the dashboard, as an ASGI application."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from kvps.errors import InvalidSetting, JobNotFound, KvpsError, NoServer, ServerLost, UsageError
from kvps.parsing import NAME
from kvps.store import Store
from kvps_monitor.dashboard import answers
from kvps_monitor.dashboard.access import Access, Guard
from kvps_monitor.dashboard.frames import as_json
from kvps_monitor.dashboard.watches import TooManyWatches, Watches
from kvps_monitor.views import JobView

STATIC = Path(__file__).with_name("static")
_COUNT = re.compile(r"[0-9]{1,15}", re.ASCII)
_MS = re.compile(r"[0-9]{1,15}(\.[0-9]{1,6})?", re.ASCII)
_MOST_VIEWERS = 256

Handler = Callable[[Request], Awaitable[Response]]


def application(store: Store, watches: Watches, access: Access) -> Starlette:
    """Return the application that shows the jobs of a store to those who have access."""
    api = _Api(store, watches)
    job = "/api/jobs/{job}"
    pages = ("/", "/jobs/{job}", "/jobs/{job}/log", "/jobs/{job}/workers/{worker}")
    routes = [
        *(Route(path, _page) for path in pages),
        Route("/api/server", _answered(api.server)),
        Route("/api/jobs", _answered(api.jobs)),
        Route(job, _answered(api.job)),
        Route(f"{job}/events", _answered(api.events)),
        Route(f"{job}/log", _answered(api.log)),
        Route(f"{job}/spans", _answered(api.spans)),
        Route(f"{job}/workers/{{worker}}", _answered(api.worker)),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, access)])


async def _page(request: Request) -> Response:
    """The one page, whose script shows what its path names."""
    return FileResponse(STATIC / "page.html", media_type="text/html")


def _answered(handler: Handler) -> Handler:
    """Make an error of kvps the answer: a line of JSON with its message."""

    @wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except KvpsError as error:
            return _json({"error": str(error)}, _status(error))

    return answer


def _status(error: KvpsError) -> int:
    if isinstance(error, JobNotFound):
        return 404
    if isinstance(error, UsageError):
        return 400
    return 503 if isinstance(error, NoServer | ServerLost | TooManyWatches) else 500


def _json(value: Any, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


class _Api:
    """What programs and the pages' scripts ask for. What reads Redis does so on a thread, not in the event loop."""

    def __init__(self, store: Store, watches: Watches) -> None:
        self._store = store
        self._watches = watches

    async def server(self, request: Request) -> Response:
        """The server's name, and how many viewers each job has that is looked at."""
        name = await asyncio.to_thread(lambda: self._store.server_name)
        return _json({"server": name, "viewers": self._watches.count()})

    async def jobs(self, request: Request) -> Response:
        """All jobs."""
        return await _made(answers.job_list, self._store)

    async def job(self, request: Request) -> Response:
        """A job as it is now."""
        return await self._made_of(request, lambda view, kept: view.as_json())

    async def events(self, request: Request) -> Response:
        """The stream of what changes in a job."""
        name, worker = _job(request), request.query_params.get("worker")
        if sum(self._watches.count().values()) >= _MOST_VIEWERS:
            return PlainTextResponse("Too many viewers.\n", 503)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        frames = await self._watches.frames(name, worker)
        return StreamingResponse(frames, media_type="text/event-stream", headers=headers)

    async def log(self, request: Request) -> Response:
        """A page of the log."""
        asked = request.query_params
        count = int(_asked(request, "count", "50", _COUNT))
        name, worker, kinds = _job(request), asked.get("worker"), asked.get("kinds", "")
        wanted = [kind for kind in kinds.split(",") if kind]
        return await _made(answers.events_before, self._store, name, asked.get("before", ""), count, worker, wanted)

    async def spans(self, request: Request) -> Response:
        """Spans of some lanes of the timeline."""
        first, count = int(_asked(request, "first", "0", _COUNT)), int(_asked(request, "count", "32", _COUNT))
        after_ms = float(_asked(request, "after", "0", _MS))
        return await self._made_of(request, lambda view, kept: answers.spans(view, kept, first, count, after_ms))

    async def worker(self, request: Request) -> Response:
        """The last iterations of a worker."""
        worker = request.path_params["worker"]
        return await self._made_of(request, lambda view, kept: answers.worker_iterations(view, kept, worker))

    async def _made_of(self, request: Request, answer: Callable[[JobView, answers.Kept], Any]) -> Response:
        """Return as JSON what a function says of a job. What somebody looks at already is answered without Redis."""
        name = _job(request)
        look = self._watches.newest(name)
        return await _made(lambda: answer(*answers.seen(self._store, name, look)))


async def _made(answer: Callable[..., Any], *arguments: Any) -> Response:
    """Return as JSON what a function returns that may wait for Redis."""

    def make() -> bytes:
        return as_json(answer(*arguments))

    return Response(await asyncio.to_thread(make), media_type="application/json")


def _job(request: Request) -> str:
    name = str(request.path_params["job"])
    if not NAME.fullmatch(name):
        raise JobNotFound("no job has such a name")
    return name


def _asked(request: Request, name: str, default: str, pattern: re.Pattern[str]) -> str:
    """Return a number of the query as text. Raises InvalidSetting."""
    given = request.query_params.get(name, default)
    if not pattern.fullmatch(given):
        raise InvalidSetting(f"{name} must be a number, not {given[:40]!r}")
    return given
