"""Several GPUs in the WebUI: further cards compute rows of the UNet's calls, and make rows of the
VAE's pictures where these are ours, while that is Auto.

Our forward stays on the UNet between generations, as its blocks stay ours. Who sets another one
later, as ControlNet does, has all calls, and none is divided.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.cards.decoding import SeveralProgram
from lib_rocm_sd.cards.devices import chosen
from lib_rocm_sd.cards.replica import Replica
from lib_rocm_sd.cards.shares import Way
from lib_rocm_sd.cards.team import NOTHING_TO_SPLIT, SeveralStandIn, Team
from lib_rocm_sd.cards.worker import switches
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.read.blueprint import DECODER, Manner, Subject, home_of
from lib_rocm_sd.hosts.ui.options import SEVERAL_LABEL, SEVERAL_MODES, Options
from lib_rocm_sd.hosts.ui.status import StatusRow, shortened
from lib_rocm_sd.hosts.webui import host, settings
from lib_rocm_sd.hosts.webui import session as a1111_session
from lib_rocm_sd.hosts.webui.unet import WebUIHook, obstacle

HOSTS_OWN = (
    "modules.hypernetworks.hypernetwork",
    "modules.sd_hijack",
    "modules.sd_hijack_optimizations",
    "modules.sd_hijack_unet",
    "modules.sd_hijack_utils",
    "modules.sd_unet",
    "networks",
)
"""Python modules of the WebUI that put forwards into classes which compute what theirs do, or what
`_obstacle` and `WebUIHook.ready` see to.
"""
A_FORGES = "a Forge moves and patches its models in each call"
MOVED = "--medvram and --lowvram move the UNet off the card after each use"
ONE_BY_ONE = (
    "prompt and negative prompt are computed one after the other: Settings > Optimizations > "
    "Batch cond/uncond is off"
)
NEXT_PICTURE = "starts with the next picture"
VAE_LABEL = f"{SEVERAL_LABEL}, VAE"
UNEQUAL = (
    "prompt and negative prompt have different lengths and are computed one after the other; "
    "Settings > Optimizations > Pad prompt/negative prompt makes them equal"
)


class SeveralSession:
    """The team of this process, and the UNet that it computes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._team: Team | None = None
        self._choice: tuple[torch.device, str] | None = None
        self._stand_in: SeveralStandIn | None = None
        self._other_weights = self._is_on = False
        self._pictures, self._equal = 0, True
        self.left: tuple[str, ...] = ()
        """Why cards that there are, or that were asked for, are not used."""
        self.trouble = ""
        """Why no call is divided, whatever it is; empty where some may be."""

    def begin(self) -> None:
        """The next pictures are begun, of this generation or another: networks may be others."""
        with self._lock:
            if self._team is not None:
                self._team.begin()

    def establish(self, options: Options) -> None:
        """Make what `options` ask for hold from now on. Never raises."""
        with self._lock:
            try:
                self._establish(options)
            except Exception as error:
                self.end()
                self.trouble = trouble.once(error)

    def prepare(self, options: Options) -> None:
        """These are chosen on the page: start the other cards' processes before the next picture,
        where there are none yet. Never raises.
        """
        with self._lock:
            try:
                if self._team is None and self._wants(options) and not host.is_short_of_memory():
                    self._gather(options)
            except Exception as error:
                self.end()
                self.trouble = trouble.once(error)

    def _establish(self, options: Options) -> None:
        self.trouble = ""
        if not self._wants(options):
            self.end()
            return
        if host.is_short_of_memory():
            self.end()
            self.trouble = MOVED
            return
        self._gather(options)
        self._is_on = True
        self._hold(host.unet_of(host.loaded_model()))

    def _wants(self, options: Options) -> bool:
        return host.forge() is None and options.enable and SEVERAL_MODES[options.several]

    def _gather(self, options: Options) -> None:
        """See that the team is of the cards that are chosen."""
        choice = (host.device(), options.cards)
        if choice == self._choice:
            return
        self.end()
        found = chosen(*choice)
        self._choice, self.left = choice, found.left
        if found.devices:
            self._team = Team(choice[0], found.devices, lambda card: Replica(card, choice[0]))
            self._team.begin()

    def lend(self, program: SeveralProgram) -> None:
        """Let the cards make the next picture of `program` together, if there are any."""
        team = self._team if self._is_on else None  # else chosen on the page, for the next picture
        program.decoding = None if team is None else team.decoding
        if team is not None and program.subject is None:
            program.subject = Subject(program.module, _manner, HOSTS_OWN, DECODER)

    def before_step(self, params: Any) -> None:
        """Callback of the sampler: the refiner may have become the model."""
        if not self._is_on:
            return
        self._note_pair(params)
        unet = host.unet_of(host.loaded_model())
        if self._other_weights or self._stand_in is None or unet is not self._stand_in.module:
            with self._lock:
                self._hold(unet)

    def _note_pair(self, params: Any) -> None:
        """How many pictures a step makes, and whether both prompts are equally long."""
        both = [_text(getattr(params, name, None)) for name in ("text_cond", "text_uncond")]
        if all(isinstance(text, torch.Tensor) and text.ndim == 3 for text in both):
            self._pictures = len(both[1])
            self._equal = both[0].shape[1] == both[1].shape[1]

    def model_loaded(self, model: Any) -> None:
        """Callback: another model, or other weights in the same."""
        self._other_weights = True

    def end(self) -> None:
        """Leave the UNet as it is without us, and give the other cards back."""
        with self._lock:
            self._take_out()
            team, self._team = self._team, None
            self._choice, self.left, self._is_on = None, (), False
            if team is not None:
                team.close()

    def _hold(self, unet: nn.Module | None) -> None:
        """Let our forward be on `unet`, and on no other."""
        team = self._team
        if team is None:
            return
        if self._other_weights:
            self._other_weights = False
            team.forget_weights()
        self.trouble = obstacle(unet)
        if unet is None or self.trouble:
            self._take_out()
            return
        held = self._stand_in
        if held is None or held.module is not unet:
            self._take_out()
            subject = Subject(unet, _manner, HOSTS_OWN, idle=_is_idle)
            held = SeveralStandIn(subject, team, _obstacle, WebUIHook().ready)
            self._stand_in = held
        other = held.put_in()
        if other:
            self.trouble = f"the UNet's forward has been replaced ({other})"

    def _take_out(self) -> None:
        held, self._stand_in = self._stand_in, None
        if held is not None:
            held.take_out()

    @property
    def team(self) -> Team | None:
        return self._team

    def why(self) -> tuple[str, ...]:
        """Why calls are not divided, or why not over all cards."""
        team = self._team
        said = "" if team is None else team.why
        if said == NOTHING_TO_SPLIT:
            opts: Any = host.attribute("modules.shared", "opts")
            said = ONE_BY_ONE if not getattr(opts, "batch_cond_uncond", True) else said
            said = said if self._equal else UNEQUAL
        return _said(*self.left, self.trouble, said)

    def runs(self) -> str:
        """Who computed the last call, for people."""
        team = self._team
        if team is None:
            return "one card"
        if not team.way:
            return "one card" if team.why or self.trouble else NEXT_PICTURE
        shares = _shares(team, team.way)
        if len(shares) == 1:
            return "one card"
        if len(shares) == 2 and shares[0][0] == shares[1][0] == self._pictures:
            return f"prompt on {shares[0][1]}, negative prompt on {shares[1][1]}"
        return ", ".join(f"{n} of {sum(team.way)} rows on {device}" for n, device in shares)

    def vae_row(self, why_not: str) -> StatusRow:
        """Who made the VAE's last picture. `why_not`: why it is not ours; empty where it is."""
        team = self._team
        if team is None or why_not:
            return StatusRow(VAE_LABEL, "one card", _said(why_not))
        way, why = team.decoding.way, team.decoding.why
        if sum(map(bool, way)) < 2:
            runs = "one card" if way or why else NEXT_PICTURE
            return StatusRow(VAE_LABEL, runs, _said(why))
        shares = (f"{n} of {sum(way)} bands on {device}" for n, device in _shares(team, way))
        runs = ", ".join(shares)
        return StatusRow(VAE_LABEL, runs, _said(why))

    def told(self) -> dict[str, Any]:
        """For programs; JSON-able."""
        team = self._team
        members = [] if team is None else team.members
        return {
            "on": self._is_on,
            "runs": self.runs(),
            "rows": [] if team is None else list(team.way),
            "why": list(self.why()),
            "vae": {
                "bands": [] if team is None else list(team.decoding.way),
                "why": "" if team is None else team.decoding.why,
            },
            "cards": [
                {
                    "device": str(m.device),
                    "pid": m.pid,
                    "reason": m.reason,
                    "sent_bytes": m.sent_bytes,
                }
                for m in members
            ],
        }


def _shares(team: Team, way: Way) -> list[tuple[int, torch.device]]:
    """Each card's share of a call, without those that have none."""
    devices = [team.home, *(member.device for member in team.members)]
    return [(share, device) for share, device in zip(way, devices, strict=True) if share]


def _manner() -> Manner:
    session = a1111_session.current()
    graphs = settings.GRAPHS[settings.current().graphs]
    return Manner(session.level, session.headroom_bytes, graphs, switches())


def _obstacle() -> str:
    """What the WebUI does to the UNet that a copy of it does not know."""
    shared: Any = host.module("modules.shared")
    if getattr(shared, "loaded_hypernetworks", None):
        return "a hypernetwork is loaded"
    if getattr(shared.opts, "upcast_attn", False):
        return "attention is computed in float32 (Upcast cross attention layer to float32)"
    if host.attribute("modules.sd_unet", "current_unet") is not None:
        return "the SD Unet in Settings > Stable Diffusion runs the steps"
    return ""


def _is_idle(cat: Any) -> bool:
    """Whether it passes on what it is given: sd-webui-freeu is in torch.cat's place for good, and
    does nothing where it is not enabled (lib_free_u/unet.py).
    """
    theirs = cat
    while home_of(getattr(theirs, "func", None)) == "lib_free_u.unet":  # again with each Reload UI
        theirs = theirs.keywords.get("original_function")
    if theirs is cat or home_of(theirs) not in HOSTS_OWN:
        return False
    state = host.attribute("lib_free_u.global_state", "instance")
    return getattr(state, "enable", True) is False


def _said(*texts: str) -> tuple[str, ...]:
    """The first of those that say something."""
    return shortened([text for text in texts if text])


def _text(given: Any) -> Any:
    """Text embedding of a prompt; SDXL's prompts are mappings by name."""
    return given.get("crossattn") if isinstance(given, Mapping) else given


def rows(options: Options, why_not_vae: Sequence[str] = ()) -> list[StatusRow]:
    """Rows of the status table; none where this is off. `why_not_vae`: why the VAE is not ours."""
    if not options.enable or not SEVERAL_MODES[options.several]:
        return []
    if host.forge() is not None:
        return [StatusRow(SEVERAL_LABEL, "one card", (A_FORGES,))]
    if host.is_short_of_memory():
        return [StatusRow(SEVERAL_LABEL, "one card", (MOVED,))]
    if session.team is None:
        found = chosen(host.device(), options.cards)
        runs = NEXT_PICTURE if found.devices and not session.trouble else "one card"
        return [StatusRow(SEVERAL_LABEL, runs, _said(*found.left, session.trouble))]
    why_not = f"the VAE is not ours: {why_not_vae[0]}" if why_not_vae else ""
    return [StatusRow(SEVERAL_LABEL, session.runs(), session.why()), session.vae_row(why_not)]


session = SeveralSession()
"""The session of the process; survives "Reload UI"."""
