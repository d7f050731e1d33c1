"""Who may use the HTTP routes, for what, and under which name of the machine."""

from __future__ import annotations

import base64
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from api_help import BENCH, CHECK, JSON, STATUS, Bench, client_of
from conftest import FakeGpu, Start


def with_login(name: str, password: str) -> dict[str, str]:
    token = base64.b64encode(f"{name}:{password}".encode()).decode()
    return {"Authorization": f"Basic {token}"}


ROUTES: list[Callable[..., Any]] = [
    lambda client, **more: client.get(STATUS, **more),
    lambda client, **more: client.post(CHECK, json={}, **more),
    lambda client, **more: client.post(BENCH, json={"hack": 1}, **more),
    lambda client, **more: client.get(f"{BENCH}/x", **more),
    lambda client, **more: client.delete(f"{BENCH}/x", **more),
]
PASSED = [200, 202, 422, 404, 404]


def test_api_auth(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, args="--api --api-auth me:secret,other:pass-word")
    client = client_of(webui)
    wrong = (
        {},
        with_login("me", "Secret"),
        with_login("me", "pass-word"),
        with_login("nobody", "secret"),
        with_login("", ""),
        with_login("me", "secr\u00e9t"),
        {"Authorization": "Bearer secret"},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic"},
    )
    for headers in wrong:
        for ask in ROUTES:
            answer = ask(client, headers=headers)
            assert answer.status_code == 401, headers
            assert answer.headers["www-authenticate"].startswith("Basic")
    for login in (with_login("me", "secret"), with_login("other", "pass-word")):
        assert [ask(client, headers=login).status_code for ask in ROUTES] == PASSED


@pytest.mark.parametrize("value", ["nonsense", ":", ","])
def test_api_auth_that_names_nobody_lets_nobody_pass(
    start: Start, gpu: FakeGpu, value: str
) -> None:
    client = client_of(start(gpu=gpu, args=f"--api-auth {value}"))
    for headers in ({}, with_login("nonsense", ""), with_login("x", "y")):
        assert client.get(STATUS, headers=headers).status_code == 401


def test_without_api_auth_nobody_is_asked(start: Start, gpu: FakeGpu) -> None:
    client = client_of(start(gpu=gpu, args="--api"))
    assert [ask(client).status_code for ask in ROUTES] == PASSED


@pytest.mark.parametrize("args", ["", "--api-auth me:secret"])
def test_without_api_nothing_is_started_or_ended(start: Start, gpu: FakeGpu, args: str) -> None:
    webui = start(gpu=gpu, args=args)
    bench = Bench(webui)
    client, headers = client_of(webui), with_login("me", "secret") if args else {}
    assert client.get(STATUS, headers=headers).status_code == 200
    for ask in (client.post, client.delete):
        answer = ask(BENCH if ask == client.post else f"{BENCH}/x", headers={**JSON, **headers})
        assert answer.status_code == 403
        assert client.post(CHECK, json={}, headers=headers).status_code == 403
        assert "--api; its page does it without" in answer.json()["detail"]
    assert not bench.session.running
    ident = bench.session.start(webui.library("lab.speed_result").parse({}), bench)
    try:
        answer = client.get(f"{BENCH}/{ident}", headers=headers)
        assert answer.json()["state"] == "running"
        assert client.delete(f"{BENCH}/{ident}", headers=headers).status_code == 403
        assert bench.session.running
    finally:
        bench.go.set()
        assert bench.session.wait(600)
    if args:
        assert client.post(BENCH, headers=JSON).status_code == 401


def test_nowebui_is_the_api(start: Start, gpu: FakeGpu) -> None:
    client = client_of(start(gpu=gpu, args="--nowebui"))
    assert [ask(client).status_code for ask in ROUTES] == PASSED


OWN = (
    *("localhost", "localhost:7860", "LOCALHOST.", "127.0.0.1:7860", "192.168.1.20", "0.0.0.0:1"),
    *(
        "[::1]:7860",
        "[fe80::1]",
        "my-pc:7860",
        "my-pc.local:7860",
        "webui.localhost",
        "203.0.113.9",
    ),
)
FOREIGN = (
    *("evil.example", "evil.example:7860", "127.0.0.1.evil.example", "localhost.evil.example"),
    *(
        "my-pc.local.evil.example",
        "evil.example.",
        "x@127.0.0.1",
        "",
        "[",
        "127.0.0.1/evil.example",
    ),
    *("abc.gradio.live", "abc.ngrok.io", "1.2.3.4.5", "sd.example.org"),
)


def statuses(client: Any, hosts: tuple[str, ...]) -> dict[str, list[int]]:
    return {
        name: [ask(client, headers={"Host": name}).status_code for ask in ROUTES] for name in hosts
    }


def test_a_foreign_host_is_refused(start: Start, gpu: FakeGpu) -> None:
    client = client_of(start(gpu=gpu, args="--api"))
    assert statuses(client, OWN) == dict.fromkeys(OWN, PASSED)
    assert statuses(client, FOREIGN) == dict.fromkeys(FOREIGN, [403] * 5)
    answer = client.get(STATUS, headers={"Host": "e" * 5000 + ".example"})
    assert len(answer.text) < 300
    assert "no name of this WebUI" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ("--server-name SD.example.org", "sd.example.org"),
        ("--cors-allow-origins https://a.example,https://sd.example.org:8443", "sd.example.org:80"),
        ("--ngrok token", "abc.ngrok.io"),
    ],
)
def test_names_that_the_owner_has_given(start: Start, gpu: FakeGpu, args: str, name: str) -> None:
    client = client_of(start(gpu=gpu, args=f"--api {args}"))
    assert statuses(client, (name,)) == {name: PASSED}
    assert statuses(client, ("evil.example",)) == {"evil.example": [403] * 5}


def test_the_name_of_the_share_link(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, args="--api", ui=False)
    webui.shared.demo = SimpleNamespace(share_url="https://abc.gradio.live")
    client = client_of(webui)
    assert statuses(client, ("abc.gradio.live",)) == {"abc.gradio.live": PASSED}
    assert statuses(client, ("other.gradio.live",)) == {"other.gradio.live": [403] * 5}
