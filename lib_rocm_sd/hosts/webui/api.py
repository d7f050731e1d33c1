"""HTTP: the state, trials and the speed test, for programs. docs/api.md says what a client sees.

Nothing here waits for a generation or a test. The routes run in the server's event loop and not in
its threads, all of which may be waiting for the WebUI's queue.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from lib_rocm_sd.hosts.webui import guard, public, trials
from lib_rocm_sd.hosts.webui import speedtest as a1111_speedtest
from lib_rocm_sd.lab import speed_result
from lib_rocm_sd.lab.speed_session import Busy, Progress, session

ROOT = "/rocm-sd/v1"
MOST_BODY_BYTES = 16384
UNKNOWN = "no speed test has this id; those of the last 20 that this WebUI made are kept"


def add_routes(app: Any) -> None:
    """Add them to the server's app, once; under --api-auth where that is given.

    What starts or ends something is refused without --api.
    """
    if any(getattr(route, "path", "") == f"{ROOT}/status" for route in app.router.routes):
        return
    all_ask = [Depends(guard.known_host), *guard.login()]
    for path, method, endpoint in (
        ("/status", "GET", get_status),
        ("/check", "POST", post_check),
        ("/bench", "POST", post_bench),
        ("/bench/{ident}", "GET", get_bench),
        ("/bench/{ident}", "DELETE", delete_bench),
    ):
        asks = all_ask if method == "GET" else [*all_ask, Depends(guard.api_is_on)]
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
