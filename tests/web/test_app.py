"""The web application, called as a server would call it: access, and the answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install 'ttp-ft[web]'")

from tests.cli.conftest import Ttp, ttp
from tests.cli.test_incidents import SAVED, write
from tests.web.test_view import status
from ttp.cli.connection import Where
from ttp.cli.status import describe
from ttp.errors import ConfigError
from ttp.launch.token_file import write_token
from ttp.web.app import HEADERS, make_app
from ttp.web.looks import Incidents, Looks

__all__ = ["ttp"]

HOSTILE = "<script>alert(1)</script>\x1b[31m"
HERE = Where("here", 1, "")
BEARER = {"authorization": "Bearer secret"}


@dataclass
class Answer:
    code: int
    headers: dict[str, str]
    text: str


async def get(app: Any, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Answer:
    """Send a request as a server does: starlette releases differ in how they make a URL of these parts."""
    said: list[dict[str, Any]] = []
    where, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": where, "raw_path": where.encode(), "root_path": "", "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip

    first = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in first:
            return message
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in said[1:]).decode()
    return Answer(said[0]["status"], {k.decode(): v.decode() for k, v in said[0]["headers"]}, body)


@contextlib.asynccontextmanager
async def watching(ask: Callable[[], Any], incidents: Incidents) -> AsyncIterator[tuple[Looks, Any]]:
    """Yield what looks at a job, which works inside, and the application."""
    looks = Looks(ask, incidents)
    running = asyncio.create_task(looks.run())
    try:
        yield looks, make_app(looks, "secret", 8780)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def trains() -> Any:
    return status("training", "llll"), HERE


def nobody() -> Any:
    raise ConfigError("nobody is there")


def ask(tmp_path: Path, *paths: str, headers: dict[str, str] | None = None, method: str = "GET") -> list[Answer]:
    """Return answers of an application whose job has had a hostile incident."""
    evil = [(0.1, "evidence", {"rank": 1, "evidence": "exception", "text": HOSTILE, "detail": HOSTILE})]
    write(tmp_path, "one", [SAVED[0], *evil, *SAVED[2:]])
    now = status("training", "llll", framework=HOSTILE, save_dir=str(tmp_path))

    async def run() -> list[Answer]:
        async with watching(lambda: (now, HERE), Incidents(tmp_path)) as (_, app):
            return [await get(app, path, headers, method) for path in paths]

    return asyncio.run(run())


PATHS = ["/", "/plain", "/events", "/api/v1/status", "/api/v1/incidents", "/api/v1/incidents/one"]
PATHS += ["/api/v1/incidents/one/trace.json", "/static/page.js", "/no"]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"cookie": "ttp_web_8780=wrong; a=b"}])
def test_without_the_token_nothing_is_told_but_that_the_process_lives(tmp_path: Path, headers: dict[str, str]) -> None:
    answers = ask(tmp_path, *PATHS, "/?token=wrong", "/?token=", headers=headers)
    assert {answer.code for answer in answers} == {401} and "ttp web" in answers[0].text
    assert [answer.code for answer in ask(tmp_path, "/healthz", headers=headers)] == [200]


@pytest.mark.parametrize("host", ["x/healthz?", "x/healthz#", "x/healthz/..", "[", "x:y"])
def test_no_host_header_opens_the_door_or_breaks_it(tmp_path: Path, host: str) -> None:
    answers = ask(tmp_path, *PATHS, "/healthz/", "//healthz", headers={"host": host})
    assert {answer.code for answer in answers} == {401}
    assert [answer.code for answer in ask(tmp_path, "/healthz", headers={"host": host})] == [200]


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "///evil.example"])
def test_the_token_in_an_address_leads_to_no_other_server(tmp_path: Path, path: str) -> None:
    (answer,) = ask(tmp_path, f"{path}?token=secret", headers={"host": "good.example"})
    place = answer.headers["location"]
    assert answer.code == 303 and place.startswith("/") and not place.startswith(("//", "/\\"))


def test_the_token_becomes_a_cookie_that_scripts_cannot_read(tmp_path: Path) -> None:
    (first,) = ask(tmp_path, "/?token=secret")
    cookie = first.headers["set-cookie"]
    assert first.code == 303 and first.headers["location"] == "/" and "HttpOnly" in cookie and "lax" in cookie.lower()
    assert ask(tmp_path, "/", headers={"cookie": cookie.partition(";")[0]})[0].code == 200


def test_it_is_read_only(tmp_path: Path) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        for headers in (BEARER, {}):
            answers = ask(tmp_path, *PATHS, "/healthz", "/?token=secret", headers=headers, method=method)
            assert {(a.code, a.headers["allow"], "set-cookie" in a.headers) for a in answers} == {
                (405, "GET, HEAD", False)
            }
    assert [a.code for a in ask(tmp_path, "/", "/api/v1/incidents", headers=BEARER, method="HEAD")] == [200, 200]


def test_every_answer_forbids_what_is_not_ours(tmp_path: Path) -> None:
    for answer in ask(tmp_path, "/", "/plain", "/api/v1/status", "/static/page.css", "/no", headers=BEARER):
        assert all(answer.headers[name.lower()] == value for name, value in HEADERS.items())


def test_what_is_told(tmp_path: Path) -> None:
    shown, listed, one, trace, none, outside = ask(
        tmp_path, "/api/v1/status", *PATHS[4:7], "/api/v1/incidents/two", "/api/v1/incidents/..%2fone", headers=BEARER
    )
    seen = json.loads(shown.text)
    assert seen["status"] == describe(status("training", "llll", framework=HOSTILE, save_dir=str(tmp_path)), HERE)
    assert seen["counts"] == {"live": 4} and json.loads(listed.text)[0]["id"] == "one"
    assert json.loads(one.text)["saved"].startswith("version 12") and json.loads(trace.text)["traceEvents"]
    assert (none.code, outside.code) == (404, 404)


def test_what_the_files_tell_meanwhile_is_no_answer_of_the_job(tmp_path: Path) -> None:
    """The first request after a long time found the state of then: files had changed, and made a view first."""
    answers, may_answer = [status("training", "llll"), status("saving", "ffff")], threading.Event()

    def asked() -> Any:
        if len(answers) == 1:
            may_answer.wait(20)
        return answers.pop(0) if len(answers) > 1 else answers[0], HERE

    async def run() -> str:
        async with watching(asked, Incidents(tmp_path)) as (looks, app):
            await get(app, "/api/v1/status", BEARER)
            write(tmp_path, "one", SAVED)
            again = asyncio.create_task(get(app, "/api/v1/status", BEARER))
            while not json.loads(looks.text)["incidents"]:  # until the files have made a view
                await asyncio.sleep(0.01)
            may_answer.set()
            return str(json.loads((await again).text)["stage"])

    assert asyncio.run(run()) == "saving"


def test_a_file_name_that_is_not_utf8_hides_no_other_incident(tmp_path: Path) -> None:
    write(tmp_path, "\udcff", SAVED)
    of_it = [f"/api/v1/incidents/\ufffd{end}" for end in ("", "/trace.json")]
    listed, plain, *others = ask(tmp_path, "/api/v1/incidents", "/plain", *of_it, headers=BEARER)
    assert {one["id"] for one in json.loads(listed.text)} == {"one", "\ufffd"} and "one" in plain.text
    assert [answer.code for answer in others] == [200, 200]


def test_hostile_texts_are_no_markup(tmp_path: Path) -> None:
    (plain,) = ask(tmp_path, "/plain", headers=BEARER)
    assert "<script>" not in plain.text and "&lt;script>" in plain.text and "\x1b" not in plain.text


def test_a_controller_that_does_not_answer_is_said() -> None:
    async def run() -> Answer:
        async with watching(nobody, Incidents(None)) as (_, app):
            return await get(app, "/api/v1/status", BEARER)

    seen = json.loads(asyncio.run(run()).text)
    assert (seen["error"], seen["status"]) == ("nobody is there", None)


class Hanging(Incidents):
    """Incidents on a storage that hangs."""

    def __init__(self) -> None:
        super().__init__(None)
        self.works = threading.Event()

    def ended(self) -> str:
        self.works.wait(60)
        return ""

    def read(self, name: str) -> None:
        self.works.wait(60)


@pytest.mark.parametrize(("job", "error"), [(trains, ""), (nobody, "nobody is there")])
def test_a_storage_that_hangs_keeps_nobody_from_the_status(job: Callable[[], Any], error: str) -> None:
    """Whoever asks for an incident waits, and there may be more of them than threads."""
    files = Hanging()

    async def run() -> tuple[Answer, Answer]:
        async with watching(job, files) as (_, app):
            waiting = [asyncio.create_task(get(app, "/api/v1/incidents/one", BEARER)) for _ in range(50)]
            await asyncio.sleep(0)
            try:
                answers = asyncio.gather(get(app, "/", BEARER), get(app, "/api/v1/status", BEARER))
                return await asyncio.wait_for(answers, 30)
            finally:
                files.works.set()
                await asyncio.gather(*waiting)

    page, shown = asyncio.run(run())
    assert page.code == 200 and json.loads(shown.text)["error"] == error


@pytest.mark.parametrize("path", ["/plain", "/api/v1/status"])
def test_the_first_answer_has_the_incidents(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job tells the directory, when the files have been looked at already."""
    monkeypatch.setattr("ttp.web.looks.LOOK_S", 60.0)
    write(tmp_path, "one", SAVED)
    look, looked = Incidents.look, threading.Event()

    def noted(files: Incidents) -> bool:
        found = look(files)
        looked.set()
        return found

    def told() -> Any:
        assert looked.wait(30)
        return status("training", "llll", save_dir=str(tmp_path)), HERE

    monkeypatch.setattr(Incidents, "look", noted)

    async def run() -> Answer:
        async with watching(told, Incidents(None)) as (_, app):
            return await get(app, path, BEARER)

    assert "saved version 12" in asyncio.run(run()).text


def test_a_slow_storage_does_not_stop_the_list_of_incidents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttp.web.looks.SHARE", 1e6)
    monkeypatch.setattr("ttp.web.looks.FILES_S", 0.1)
    seen: list[int] = []

    class Slow(Incidents):
        def look(self) -> bool:
            seen.append(1)
            return False

    async def run() -> None:
        async with watching(trains, Slow(None)) as (looks, _):
            for _ in range(500):
                looks.want()
                await asyncio.sleep(0.02)
                if len(seen) > 2:
                    break

    asyncio.run(run())
    assert len(seen) > 2


def test_nobody_is_asked_while_nobody_watches() -> None:
    asked: list[int] = []

    def count() -> Any:
        asked.append(1)
        return trains()

    async def run() -> None:
        async with watching(count, Incidents(None)) as (looks, _):
            await asyncio.sleep(0.1)
            assert not asked
            assert await looks.newer(0, 5.0) and asked

    asyncio.run(run())


# create_server() leaves its socket to the garbage collector if the name is not UTF-8
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_be_served_is_said(ttp: Ttp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn", reason="pip install 'ttp-ft[web]'")

    def refused(*arguments: str, **env: str) -> str:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            said = ttp("web", "--save-dir", tmp_path, *arguments)
        assert (said.code, said.out) == (64, "")
        return said.err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port}" in refused("--listen", f"127.0.0.1:{port}")
    assert "HOST:PORT" in refused("--listen", "8780")
    assert "cannot listen at" in refused("--listen", "\udcff:0"), "not UTF-8"
    assert "cannot listen at" in refused("--listen", "nobody.invalid:0")
    secret, two = tmp_path / "token", tmp_path / "two"
    secret.write_text("secret")
    two.touch(mode=0o600)
    two.write_text("one\ntwo\n")
    free = ("--listen", "127.0.0.1:0", "--access-token-file")
    assert "chmod 600" in refused(*free, str(secret))
    assert "printable ASCII" in refused(*free, str(two))
    secret.chmod(0o600)
    assert "job's own token" in refused(*free, str(secret), TTP_TOKEN_FILE=str(secret))
    assert "job's own token" in refused(*free, str(secret), "--token", "secret", "--port", "1")
    (tmp_path / "run").mkdir()
    write_token(tmp_path / "run", "secret")
    left = {"TTP_RUN_DIR": str(tmp_path / "run"), "TTP_PORT": "1"}
    assert "job's own token" in refused(*free, str(secret), **left), "the launcher left it"
    assert "the port of the controller is not known" in ttp("web").err
