"""Who may ask over HTTP, and for what; each is a dependency of routes."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from secrets import compare_digest
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPBasic, HTTPBasicCredentials

from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.lab.speed_result import shown

NO_API = (
    "over HTTP something is started and ended only where the WebUI runs with --api; its page does "
    "it without"
)
NGROK = (".ngrok.io", ".ngrok.app", ".ngrok.dev", ".ngrok-free.app", ".ngrok-free.dev")
_basic = HTTPBasic(auto_error=False)


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
