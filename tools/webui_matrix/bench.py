"""Makes the pictures of the scenarios in one WebUI, and keeps what was found."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.webui_client import SCRIPT, Client, Made
from tools.webui_matrix import judge
from tools.webui_matrix.judge import Apart, Found, apart, farthest
from tools.webui_matrix.scenarios import PLAIN, QUIET, Arguments, Scenario
from tools.webui_matrix.values import MissingError, World, filled, labelled

OPTIMIZER = "cross_attention_optimization"
YARDSTICK = ("Doggettx", "sdp - scaled dot product")
"""Two of the host's own optimizers: what they differ by is nobody's mistake."""
STATES = {"off": False, "on": True}
ANSWER_S = 300.0
DIVIDED_S = 14.0
"""How long pictures are made before other cards have to have computed some of them."""


class Bench:
    """Of one running WebUI.

    `other` is one without ours that computes attention in another way, where a WebUI does not
    change that while it runs.
    """

    def __init__(
        self, client: Client, world: World, other: Client | None = None, several: bool = False
    ) -> None:
        self.client, self.world, self.other = client, world, other
        self._on: Arguments = {"Enable": True, **({"Several GPUs": "Auto"} if several else {})}
        self._several = several
        for each in filter(None, (client, other)):
            each.answer_s = ANSWER_S
        said = client.ask("sdapi/v1/script-info")
        self.known = {
            (each["name"], each["is_img2img"]): each["args"] for each in said if each["is_alwayson"]
        }
        self.plain: dict[str, Made] = {}
        self.references: dict[str, Made] = {}
        self.asked_for = "off"
        """The state in the last request."""

    def begin(self) -> dict[str, Any]:
        """Wait until ours computes, then make the plain pictures that all others leave alone."""
        for _ in range(2):
            self.client.settle(lambda: self.paint({"steps": 2}, {}, "on"))
        twice = {}
        for state in STATES:
            first = self.paint({}, {}, state)
            self.plain[state] = self.paint({}, {}, state)
            self.references = {"{}": self.plain["off"]}
            twice[f"{state} twice"] = asdict(apart(first, self.plain[state]))
        far = asdict(apart(self.plain["off"], self.plain["on"]))
        return {"plain": {"off-on": far, **twice, "ours": self.plain["on"].ours}}

    def paint(self, body: Mapping[str, Any], scripts: Mapping[str, Arguments], state: str) -> Made:
        """One request, with ours off or on, or to the "other" WebUI.

        Raises MissingError, ValueError for an argument that the script does not have, and
        RuntimeError with what the WebUI answers.
        """
        self.asked_for = state if state in STATES else "off"
        size = {"steps": self.world.steps, "width": self.world.side, "height": self.world.side}
        route = "img2img" if "init_images" in body else "txt2img"
        asked: dict[str, Arguments] = {**QUIET, **scripts}
        if state in STATES:
            asked[SCRIPT] = self._on if STATES[state] else {"Enable": False}
        made = {
            name: {"args": self._arguments(name, route == "img2img", given)}
            for name, given in asked.items()
            if (name, False) in self.known or name not in QUIET
        }
        whole = filled({**PLAIN, **size, **body, "alwayson_scripts": made}, self.world)
        whole["steps"] = min(whole["steps"], self.world.steps)
        whole["override_settings"] = {"live_previews_enable": False, "samples_save": False}
        return self._client(state).make(whole, route)

    def _client(self, state: str) -> Client:
        return self.other if state == "other" and self.other else self.client

    def _arguments(self, script: str, img2img: bool, given: Arguments) -> list[Any]:
        if not isinstance(given, Mapping):
            return list(given)
        if (script, img2img) not in self.known:
            raise RuntimeError(f"the WebUI has no script '{script}'")
        return labelled(self.known[script, img2img], given)

    @contextmanager
    def options(self, changes: Mapping[str, Any], state: str = "off") -> Iterator[None]:
        """Settings of the WebUI as long as the `with` lasts.

        The WebUI lists a script's setting only after it was set once; before, it is off.
        Raises MissingError if it has no such setting.
        """
        if not changes:
            yield
            return
        client, changes = self._client(state), filled(changes, self.world)
        now = client.ask("sdapi/v1/options")
        try:
            client.ask("sdapi/v1/options", changes)
        except RuntimeError as error:
            if "KeyError" not in str(error):
                raise
            raise MissingError(f"the WebUI has no setting of {', '.join(changes)}") from None
        try:
            yield
        finally:
            before = {name: now.get(name, False) for name in changes}
            client.ask("sdapi/v1/options", before)

    def reference(self, scenario: Scenario) -> Made:
        key = json.dumps(filled(scenario.reference, self.world), sort_keys=True)
        if key not in self.references:
            self.references[key] = self.paint(scenario.reference, {}, "off")
        return self.references[key]

    def measure(self, scenario: Scenario, out: Path) -> dict[str, Any]:
        """The row of one scenario, its pictures kept where they are wrong."""
        start, found = len(self.client.running.said), Found()
        row: dict[str, Any] = {"scenario": scenario.name}
        pictures: dict[str, list[Made]] = {"off": [], "on": []}
        try:
            reference = self.reference(scenario)
            self._compare(scenario, found, pictures, row)
            if pictures["off"]:
                # A script may add pictures of its own, so that their number is no effect.
                first = bool(scenario.scripts)
                found.effect = apart(pictures["off"][0], reference, first)
                found.residue = self._residue()
                found.yardstick = self._yardstick(scenario, pictures["off"][0])
        except MissingError as missing:
            return {**row, "verdict": judge.SKIPPED, "why": [str(missing)]}
        except (OSError, RuntimeError, ValueError) as error:
            found.errors[self.asked_for].append(str(error)[:400])
        found.tracebacks = judge.tracebacks_of_ours(self.client.running.said[start:])
        row["verdict"], row["why"] = judge.verdict(found)
        row |= found.as_json()
        if row["verdict"] in judge.BAD:
            _keep(scenario.name, pictures, out)
        return row

    def _compare(
        self,
        scenario: Scenario,
        found: Found,
        pictures: dict[str, list[Made]],
        row: dict[str, Any],
    ) -> None:
        """The pictures off and on, in the scenario's order."""
        with self.options(scenario.options):
            if scenario.warm:
                self.paint(scenario.body, scenario.scripts, "off")
            for state in scenario.order:
                try:
                    pictures[state].append(self.paint(scenario.body, scenario.scripts, state))
                except RuntimeError as error:
                    found.errors[state].append(str(error)[:400])
            offs, ons = pictures["off"], pictures["on"]
            if self._several:
                ons += self._divided(scenario, row)
            found.off_again = farthest([apart(offs[0], each) for each in offs[1:]])
            if not found.off_again.same:
                first = self.paint(scenario.body, scenario.scripts, "off")
                found.repeats = apart(
                    first, self.paint(scenario.body, scenario.scripts, "off")
                ).same
        found.on_off = farthest([apart(each, offs[0]) for each in ons if offs])
        found.ours = any(each.ours for each in ons)
        row["seconds"] = {state: [each.seconds for each in pictures[state]] for state in STATES}
        row["infotext"] = ons[-1].ours if ons else ""
        row["status"] = _kept(self.client.status())

    def _divided(self, scenario: Scenario, row: dict[str, Any]) -> list[Made]:
        """Pictures until other cards have computed some of two of them, or have had the time to."""
        end, made, divided = time.monotonic() + DIVIDED_S, list[Made](), 0
        while time.monotonic() < end and divided < 2:
            made.append(self.paint(scenario.body, scenario.scripts, "on"))
            told = self.client.status()["several"]
            divided += sum(map(bool, told["rows"])) > 1
        row["several"] = {"runs": told["runs"], "why": told["why"], "pictures": len(made)}
        return made

    def _residue(self) -> dict[str, Apart]:
        """How far the plain pictures are from those of before; from now on they are measure."""
        found = {}
        for state, before in self.plain.items():
            after = self.paint({}, {}, state)
            found[state] = apart(before, after)
            if not found[state].same:
                self.plain[state] = after
                self.references = {"{}": self.plain["off"]}
        return found

    def _yardstick(self, scenario: Scenario, off: Made) -> Apart:
        if self.other:
            with self.options(scenario.options, "other"):
                if scenario.warm:
                    self.paint(scenario.body, scenario.scripts, "other")
                return apart(off, self.paint(scenario.body, scenario.scripts, "other"))
        made = {}
        for optimizer in YARDSTICK:
            with self.options({**scenario.options, OPTIMIZER: optimizer}):
                made[optimizer] = self.paint(scenario.body, scenario.scripts, "off")
        self.paint({"steps": 1}, {}, "on")  # ours is applied again before the next scenario
        return apart(made[YARDSTICK[0]], made[YARDSTICK[1]])


def _kept(status: Mapping[str, Any]) -> dict[str, Any]:
    """What explains who computed."""
    ran = {f"{row['op']}: {row['variant']}" for row in status["report"]["rows"]}
    return {
        "attention": status["attention"]["reasons"],
        "blocks": status["unet"]["blocks"],
        "trouble": status["unet"]["trouble"],
        "events": status["report"]["events"][-3:],
        "ran": sorted(ran),
    }


def _keep(name: str, pictures: Mapping[str, list[Made]], out: Path) -> None:
    plain = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    for state, made in pictures.items():
        if made:
            (out / f"{plain}-{state}.png").write_bytes(made[-1].files[0])
