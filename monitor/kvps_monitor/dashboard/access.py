"""Who may look: which names a request may call this server by, and the token where other machines reach it.

A page of another site can make a browser send requests here, also under a name that its owner has pointed at this
machine's address (DNS rebinding). It cannot choose the name in the request's Host, so that is compared.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvps.machine.address import is_address, is_loopback, name_in

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""What every answer says. Nothing is loaded from elsewhere, no script is in a page, and no page of others frames it."""
_COOKIE_S = 30 * 24 * 3600


@dataclass(frozen=True)
class Access:
    """Who may look.

    names   names that a request may call this server by, without a port, in lower case
    any_ip  whether it may be called by any IP address too: no site can give its pages such a name
    token   what a viewer must know; "" if nothing
    cookie  the name of the cookie that keeps the token; other ports of this machine have others
    """

    names: frozenset[str]
    any_ip: bool
    token: str
    cookie: str

    @classmethod
    def of(cls, host: str, address: str, port: int, token: str) -> Access:
        """Return the access to a server that was asked to bind to `host`, and is bound to this address."""
        own = {"localhost", "127.0.0.1", "::1"} if is_loopback(address) else {socket.gethostname(), "localhost"}
        return cls(
            frozenset(name.lower() for name in (*own, host, address) if name),
            not is_loopback(address),
            token,
            f"kvps_{port}",
        )

    def knows_name(self, host: str) -> bool:
        """Return whether a request's Host calls this server by one of its names."""
        name = name_in(host)
        return name in self.names or (self.any_ip and is_address(name))

    def is_token(self, given: str) -> bool:
        """Return whether this is the token, in a time that says nothing of how much of it is right."""
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


class Guard:
    """Answers what may not pass, and gives every answer its headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that may not pass; None for one that may."""
        headers = Headers(scope=scope)
        if not self._access.knows_name(headers.get("host", "")):
            return PlainTextResponse("This server does not have that name: see kvps dashboard --host.\n", 421)
        if scope["method"] != "GET":
            return PlainTextResponse("The dashboard only shows: GET.\n", 405, {"Allow": "GET"})
        return self._without_token(scope, headers) if self._access.token else None

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the answer to a request that does not show the token. One that has it in its URL is sent on to the URL
        without it, with the cookie that shows it from then on: so it stays in no history."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(name == "token" and self._access.is_token(value) for name, value in query):
            return self._with_cookie(scope["path"], [pair for pair in query if pair[0] != "token"])
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._access.is_token(given.strip()):
            return None
        if any(self._access.is_token(value) for value in _cookies(headers.getlist("cookie"), self._access.cookie)):
            return None
        text = "The dashboard asks for its token: open the URL that kvps dashboard has printed.\n"
        return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})

    def _with_cookie(self, path: str, query: list[tuple[str, str]]) -> Response:
        # One slash: a browser takes what begins with two for the name of another host.
        to = "/" + path.lstrip("/\\") + (f"?{urlencode(query)}" if query else "")
        response = RedirectResponse(to, 303)
        response.set_cookie(
            self._access.cookie, self._access.token, max_age=_COOKIE_S, path="/", httponly=True, samesite="strict"
        )
        return response


def _cookies(headers: Iterable[str], name: str) -> list[str]:
    values = []
    for header in headers:
        try:
            cookies = SimpleCookie(header)
        except CookieError:
            continue
        if name in cookies:
            values.append(cookies[name].value)
    return values
