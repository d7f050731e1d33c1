"""What a speed test is asked to do: everything but a right request is refused in plain words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.lab import speed_job
from lib_rocm_sd.lab.speed_result import WHAT, Request, parse

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_defaults() -> None:
    assert parse({}) == Request(WHAT, "quick", ())


def test_a_request_survives_json() -> None:
    asked = {"what": ["vae", "attention", "vae"], "preset": "custom", "sizes": [512, 64, 512]}
    request = parse(asked)
    assert request == Request(("attention", "vae"), "custom", (64, 512))
    assert parse(request.as_dict()) == request


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (None, "an object"),
        ([], "an object"),
        ({"sizes": [512]}, "custom only"),
        ({"preset": "custom"}, "at least one"),
        ({"preset": "fast"}, "one of quick, standard, custom"),
        ({"preset": ["quick"]}, "one of quick"),
        ({"what": []}, "choose at least one"),
        ({"what": "vae"}, "a list"),
        ({"what": ["vae", {}]}, "what has {}"),
        ({"what": ["<script>"]}, "what has '<script>'"),
        ({"seed": 1}, "unknown: 'seed'"),
        ({"preset": "custom", "sizes": 512}, "a list"),
        ({"preset": "custom", "sizes": [-512]}, "64 to 8192"),
        ({"preset": "custom", "sizes": [0]}, "64 to 8192"),
        ({"preset": "custom", "sizes": [8200]}, "64 to 8192"),
        ({"preset": "custom", "sizes": [10**5000]}, "very many digits"),
        ({"preset": "custom", "sizes": [513]}, "multiple of 8"),
        ({"preset": "custom", "sizes": [512.0]}, "whole number"),
        ({"preset": "custom", "sizes": [float("nan")]}, "whole number"),
        ({"preset": "custom", "sizes": [True]}, "whole number"),
        ({"preset": "custom", "sizes": ["512"]}, "whole number"),
        ({"preset": "custom", "sizes": [512] * 9}, "at most 8"),
    ],
)
def test_refused(mapping: Any, words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse(mapping)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 150


def test_long_strings_are_cut_in_messages() -> None:
    with pytest.raises(ValueError) as refusal:
        parse({"preset": "x" * 10_000})
    assert len(str(refusal.value)) < 200


def test_names_of_cases_are_those_of_the_table() -> None:
    from lib_rocm_sd.commands.results import COLUMNS

    request = Request(preset="standard")
    named = {name for name, _, _ in speed_job.attention_cases(request, GPU)}
    custom = speed_job.attention_cases(Request(preset="custom", sizes=(512, 1024)), GPU)
    assert set(COLUMNS["attention"]) <= named
    assert {name for name, _, _ in custom} <= named
    steps = {speed_job.EFFORTS[preset].steps for preset in speed_job.EFFORTS}
    assert {int(case.split()[1]) for case in COLUMNS["image"]} == steps


def test_cases_are_those_of_stable_diffusion() -> None:
    cases = {name: p for name, _, p in speed_job.attention_cases(Request(preset="standard"), GPU)}
    assert str(cases["SD1.5 512x512 self"]) == "B2 H8 Sq4096 Sk4096 D40 float16"
    assert str(cases["SDXL 1024x1024 self"]) == "B2 H10 Sq4096 Sk4096 D64 float16"
    assert str(cases["VAE 1024x1024 middle"]) == "B1 H1 Sq16384 Sk16384 D512 float16"
    odd = speed_job.attention_cases(Request(preset="custom", sizes=(72,)), CPU)
    assert [p.seq_q for _, _, p in odd] == [81, 81, 25]
