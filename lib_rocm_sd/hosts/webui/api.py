"""HTTP: the state, trials and the speed test, for programs. docs/api.md says what a client sees.

Nothing here waits for a generation or a test. The routes run in the server's event loop and not in
its threads, all of which may be waiting for the WebUI's queue.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from ipaddress import ip_address
from secrets import compare_digest
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBasic, HTTPBasicCredentials
from starlette.requests import ClientDisconnect

from lib_rocm_sd.hosts.webui import host, public
from lib_rocm_sd.hosts.webui import speedtest as a1111_speedtest
from lib_rocm_sd.hosts.webui.trials import trials
from lib_rocm_sd.lab import speed_result
from lib_rocm_sd.lab.speed_result import shown
from lib_rocm_sd.lab.speed_session import Busy, Progress, session

ROOT = "/rocm-sd/v1"
MOST_BODY_BYTES = 16384
UNKNOWN = "no speed test has this id; those of the last 20 that this WebUI made are kept"
NO_API = (
    "over HTTP something is started and ended only where the WebUI runs with --api; its page does "
    "it without"
)
NGROK = (".ngrok.io", ".ngrok.app", ".ngrok.dev", ".ngrok-free.app", ".ngrok-free.dev")
_basic = HTTPBasic(auto_error=False)


def add_routes(app: Any) -> None:
    """Add them to the server's app, once; under --api-auth where that is given.

    What starts or ends something is refused without --api.
    """
    if any(getattr(route, "path", "") == f"{ROOT}/status" for route in app.router.routes):
        return
    all_ask = [Depends(known_host), *login()]
    for path, method, endpoint in (
        ("/status", "GET", get_status),
        ("/check", "POST", post_check),
        ("/bench", "POST", post_bench),
        ("/bench/{ident}", "GET", get_bench),
        ("/bench/{ident}", "DELETE", delete_bench),
    ):
        asks = all_ask if method == "GET" else [*all_ask, Depends(api_is_on)]
        app.add_api_route(
            f"{ROOT}{path}", endpoint, methods=[method], dependencies=asks, response_model=None
        )


async def get_status() -> JSONResponse:
    """What runs here, what is being compiled, what ran in the last generation."""
    return JSONResponse(public.status())


async def post_check(request: Request) -> JSONResponse:
    """Have tried again what a trial has barred; see trials.RISK for what may happen. The body is
    JSON, and nothing in it is looked at.
    """
    _json(await _body(request))
    said = await asyncio.get_running_loop().run_in_executor(None, trials.check)
    return JSONResponse({"said": said, "trials": public.plain(public.tried())}, 202)


async def post_bench(request: Request) -> JSONResponse:
    """Start a speed test. Of the body's "what", "preset" and "sizes" each may be left out."""
    content = _json(await _body(request))
    try:
        asked = speed_result.parse(content)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    loop = asyncio.get_running_loop()
    try:
        ident = await loop.run_in_executor(None, session.start, asked, a1111_speedtest.side)
    except Busy as busy:
        raise HTTPException(409, public.without_paths(str(busy))) from None
    return JSONResponse(_told(ident), 202)


async def get_bench(ident: str) -> JSONResponse:
    """How far a speed test is, and its result so far."""
    return JSONResponse({**_told(ident), "result": public.plain(session.result(ident))})


async def delete_bench(ident: str) -> JSONResponse:
    """Cancel a speed test; what it has measured is kept. Nothing where it has ended."""
    _told(ident)
    now = session.progress()
    if now.id == ident and now.state == "running":
        session.cancel()
    return JSONResponse(_told(ident))


async def _body(request: Request) -> bytes:
    """The body, not read further than MOST_BODY_BYTES.

    Only JSON is taken that is said to be JSON: a foreign web page cannot have a browser send that.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body has to be sent as application/json")
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MOST_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the client left before its body was complete") from None
    return body


def _json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _told(ident: str) -> dict[str, Any]:
    """A test's id, state, fraction and text. 404 for an id that is not known."""
    now = session.progress()
    if now.id != ident:
        result = session.result(ident)
        if result is None:
            raise HTTPException(404, UNKNOWN)
        now = _past(ident, result)
    return public.plain(public.progress(now))  # type: ignore[no-any-return]


def _past(ident: str, result: dict[str, Any]) -> Progress:
    """What is known of a test after which others ran."""
    if result["complete"]:
        return Progress(ident, "done", 1.0, "done")
    notes = result["notes"]
    state = "cancelled" if "cancelled" in notes else "failed"
    return Progress(ident, state, 0.0, "; ".join(notes))


# --- who may ask, and for what; each is a dependency of routes


def login() -> list[Any]:
    """What routes depend on to ask for the name and password of --api-auth, where it is given."""
    return [Depends(authorised)] if _asked_for() else []


async def authorised(given: HTTPBasicCredentials | None = Depends(_basic)) -> None:  # noqa: B008
    """Let those pass whom --api-auth names, as the WebUI's own API does."""
    name = given.username.encode() if given else b""
    password = given.password.encode() if given else b""
    passed = False
    for entry in _asked_for().split(","):
        known_name, colon, known_password = entry.partition(":")
        same_name = compare_digest(name, known_name.encode())
        same_password = compare_digest(password, known_password.encode())
        passed |= bool(given and colon) & same_name & same_password
    if not passed:
        asks = {"WWW-Authenticate": "Basic"}
        raise HTTPException(401, "Incorrect username or password", headers=asks)


async def api_is_on() -> None:
    """What changes anything is for an owner who has opened the WebUI's API."""
    if not (_flag("api") or _flag("nowebui")):
        raise HTTPException(403, NO_API)


async def known_host(request: Request) -> None:
    """Refuse a name that is not this WebUI's, under which a foreign page would be of its origin.

    Such a page's owner lets the name lead to this machine (DNS rebinding). Nobody can do that with
    an address, a name without dots, or one that ends in .local or .localhost.
    """
    given = request.headers.get("host")
    if given is not None and not _is_known(given):
        raise HTTPException(
            403,
            f"{shown(given)} is no name of this WebUI; use its IP address or localhost, or start "
            "it with the name in --cors-allow-origins",
        )


def _is_known(given: str) -> bool:
    name = _name(f"//{given}")
    if not name or set(given) & set("@/?#\\"):
        return False
    if "." not in name or name.endswith((".local", ".localhost")) or name in _names():
        return True
    if _flag("ngrok") and name.endswith(NGROK):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _names() -> Iterator[str]:
    """Names that the owner has given to this WebUI, or that its share link has."""
    yield _name(f"//{_flag('server_name')}")
    yield _name(str(host.attribute("modules.shared", "demo", "share_url") or ""))
    for origin in str(_flag("cors_allow_origins")).split(","):
        yield _name(origin)
    options = _flag("ngrok_options")
    if isinstance(options, dict):
        yield from (_name(f"//{options.get(key, '')}") for key in ("domain", "hostname"))


def _name(address: str) -> str:
    """The host of a URL, in lower case; empty where it has none."""
    try:
        return (urlsplit(address).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _asked_for() -> str:
    """The value of --api-auth; empty if it is not given."""
    return str(_flag("api_auth"))


def _flag(name: str) -> Any:
    """A command-line flag of the WebUI; empty where it is not given or not known."""
    return getattr(host.attribute("modules.shared", "cmd_opts"), name, None) or ""
