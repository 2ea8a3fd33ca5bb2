"""The page as an ASGI application: only GET (and HEAD) requests, and only with the page's own token.

The token comes once as ``/?token=...`` and is a cookie from then on, or comes as ``Authorization: Bearer``. It is not
the job's token: it allows reading only. A page of another origin has no such cookie, under whatever name it reaches
this server. All files of the page are served from here. Its texts come from programs that crashed, so the script
inserts them as text, and the content security policy runs only files of this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import json
from collections.abc import AsyncIterator, Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from rich.console import Console
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ttp.cli.output import shown, table, when_text
from ttp.cli.status import describe, picture
from ttp.cli.trace_events import trace_text
from ttp.errors import TtpError
from ttp.web.looks import Looks
from ttp.web.story import story

STATIC = Path(__file__).with_name("static")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
METHODS = ("GET", "HEAD")
WAIT_S = 1.0
QUIET_S = 15.0
"""Largest number of seconds without data in a stream, because proxies drop silent connections."""
FIRST_S = 8.0
WATCHERS_MAX = 64
REFUSED = (
    "This page needs its token: open the address that `ttp web` printed when it started, with ?token=... at its end, "
    "or send it as `Authorization: Bearer`.\n"
)


class Door:
    """A middleware that admits only requests with the token, and adds headers to every answer.

    Args:
        app: the application behind it.
        token: the page's token.
        cookie: name of the cookie for the token.
        secure: whether the cookie is only sent over TLS.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str, secure: bool) -> None:
        self._app, self._token, self._cookie, self._secure = app, token, cookie, secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        request, path = Request(scope), scope["path"]  # not request.url, which contains the client's Host header
        given = request.query_params.get("token")
        if scope["method"] not in METHODS:
            await PlainTextResponse("read-only\n", 405, {"Allow": ", ".join(METHODS)})(scope, receive, answer)
        elif given is not None and self._fits(given):
            response: Response = RedirectResponse("/" + path.lstrip("/"), 303)
            # Lax, so that a link in a chat works; a request from another site cannot change anything here.
            settings: Any = {"httponly": True, "samesite": "lax", "secure": self._secure}
            response.set_cookie(self._cookie, self._token, **settings)
            await response(scope, receive, answer)
        elif path == "/healthz" or self._fits(_bearer(request)) or self._fits(self._remembered(request)):
            await self._app(scope, receive, answer)
        else:
            await PlainTextResponse(REFUSED, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, answer)

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _remembered(self, request: Request) -> str:
        found: SimpleCookie = SimpleCookie()
        with contextlib.suppress(CookieError):
            found.load(request.headers.get("cookie", ""))
        return found[self._cookie].value if self._cookie in found else ""


def _bearer(request: Request) -> str:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


def make_app(
    looks: Looks, token: str, port: int = 0, secure: bool = False, ends: Callable[[], bool] | None = None
) -> Any:
    """Return the application.

    Args:
        looks: observes the job; runs as long as the application.
        token: the page's token; see ``Door``.
        port: port of the server, which is part of the cookie's name, because all ports of a host share cookies.
        secure: whether the page is served over TLS.
        ends: function that returns whether the server is shutting down, so that streams end.
    """
    pages = _Pages(looks, ends or (lambda: False))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(looks.run())
        yield
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    routes = [
        Route("/", pages.page, methods=["GET"]),
        Route("/plain", pages.plain, methods=["GET"]),
        Route("/healthz", pages.health, methods=["GET"]),
        Route("/events", pages.events, methods=["GET"]),
        Route("/api/v1/status", pages.status, methods=["GET"]),
        Route("/api/v1/incidents", pages.incidents, methods=["GET"]),
        Route("/api/v1/incidents/{name}", pages.incident, methods=["GET"]),
        Route("/api/v1/incidents/{name}/trace.json", pages.trace, methods=["GET"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    door = Middleware(Door, token=token, cookie=f"ttp_web_{port}", secure=secure)
    return Starlette(routes=routes, middleware=[door], lifespan=lifespan)


class _Pages:
    """The handlers of all routes."""

    def __init__(self, looks: Looks, ends: Callable[[], bool]) -> None:
        self._looks, self._ends = looks, ends
        self._watching = 0

    async def health(self, request: Request) -> Response:
        """Answer ``ok``, for health checks."""
        return PlainTextResponse("ok\n")

    async def page(self, request: Request) -> Response:
        """Send the HTML page, which its script fills."""
        return Response(await asyncio.to_thread((STATIC / "page.html").read_bytes), media_type="text/html")

    async def plain(self, request: Request) -> Response:
        """Send ``ttp status`` and the list of incidents as text, for terminals and browsers without scripts."""
        await self._looks.fresh(FIRST_S)
        out = io.StringIO()
        console = Console(file=out, width=140, force_terminal=False, highlight=False)
        error = json.loads(self._looks.text).get("error", "")
        if error:
            console.print(shown(error), soft_wrap=True)
        if self._looks.status is not None:
            console.print(picture(self._looks.status))
        rows = [(one["id"], when_text(one["opened_unix_s"]), one["cause"], one["outcome"]) for one in self._listed]
        console.print(table(("incident", "when", "cause", "outcome"), rows[:20]))
        text = out.getvalue().replace("&", "&amp;").replace("<", "&lt;")
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        return HTMLResponse(f"{head}<title>ttp</title><main><pre>{text}</pre></main></html>")

    @property
    def _listed(self) -> list[dict[str, Any]]:
        return self._looks.incidents.listed

    async def status(self, request: Request) -> Response:
        """Send a new view as JSON; ``status`` in it is what ``ttp status --json`` prints, null without an answer."""
        await self._looks.fresh(FIRST_S)
        seen, answer = json.loads(self._looks.text), self._looks.answer
        seen["status"] = None if answer is None else await asyncio.to_thread(describe, *answer)
        return Response(json.dumps(seen), media_type="application/json")

    async def incidents(self, request: Request) -> Response:
        """Send the list of incidents as JSON, newest first."""
        await self._looks.read(self._looks.incidents.look)
        return Response(json.dumps(self._listed), media_type="application/json")

    async def incident(self, request: Request) -> Response:
        """Send the data of one incident as JSON; see ``ttp.web.story``."""
        return await self._of_incident(request, lambda log: json.dumps(story(log)))

    async def trace(self, request: Request) -> Response:
        """Send one incident as a trace for ui.perfetto.dev."""
        return await self._of_incident(request, trace_text)

    async def _of_incident(self, request: Request, tell: Callable[[Any], str]) -> Response:
        def read() -> str | None:
            found = self._looks.incidents.read(request.path_params["name"])
            return None if found is None else tell(found)

        try:
            text = await self._looks.read(read)
        except TtpError as problem:
            return JSONResponse({"error": str(problem)}, 500)
        if text is None:
            return JSONResponse({"error": "there is no file of an incident with this id"}, 404)
        return Response(text.encode(errors="replace"), media_type="application/json")

    async def events(self, request: Request) -> Response:
        """Send every new view as a server-sent event. Each event is a whole view; a slow client misses some."""
        if self._watching >= WATCHERS_MAX:
            return PlainTextResponse(f"{WATCHERS_MAX} pages are open already: close one\n", 503)
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _stream(self) -> AsyncIterator[str]:
        self._watching += 1
        try:
            sent, quiet_s = 0, 0.0
            yield "retry: 2000\n\n"
            while not self._ends():
                if await self._looks.newer(sent, WAIT_S):
                    sent, quiet_s = self._looks.number, 0.0
                    yield f"id: {sent}\ndata: {self._looks.text}\n\n"
                elif (quiet_s := quiet_s + WAIT_S) >= QUIET_S:
                    quiet_s = 0.0
                    yield ": still here\n\n"
        finally:
            self._watching -= 1
