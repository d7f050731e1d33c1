"""`python -m lib_rocm_sd suite`: whole pictures by every way of making them, in one run: time,
memory, power, and how far each is from float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import cache as folder_cache
from lib_rocm_sd.checks import UsageError, told
from lib_rocm_sd.commands.little_model import check_installed, load
from lib_rocm_sd.commands.support import (
    add_device,
    add_dtype,
    check_writable,
    device_of,
    dtype_of,
)
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.measure import stamp
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.diffusers.pipeline import EngineAttnProcessor, patched
from lib_rocm_sd.lab import rows as lines
from lib_rocm_sd.lab import sensors
from lib_rocm_sd.lab.methods import DoggettxLike, SubQuadraticLike
from lib_rocm_sd.lab.rows import GOES_ON, Row, TextTable, say, write_json, write_whole
from lib_rocm_sd.lab.speed_result import MOST_TEXT
from lib_rocm_sd.lab.suite import captions, document, page, quality, run, serving, workloads
from lib_rocm_sd.lab.suite.document import SuiteDocument
from lib_rocm_sd.lab.suite.painter import (
    Enlarger,
    Painter,
    enlarger,
    random_painter,
)
from lib_rocm_sd.lab.suite.run import NotHere, Plan, Way
from lib_rocm_sd.lab.suite.workloads import PRESETS, PROMPTS, WORKLOADS, Workload
from lib_rocm_sd.lab.timing import FAILED, why
from lib_rocm_sd.ops.attention.inputs import AttentionInputs, problem_of
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.report import Report
from lib_rocm_sd.upscaler.program import Upscaler

RANDOM = "random weights"
REQUESTS = 20
"""How many each scenario has."""
SCENARIO_WAYS = ("sdp", page.OURS)
PARTS_OF_A_PICTURE = ("text encoder", "step", "decode", "upscale", "host")
"""They stand in the result alone."""
LOCK = "suite"


def _psnr(row: Row) -> str:
    return "equal" if row.largest == 0 else lines.figure(row.psnr, ".1f")


TEXT = TextTable(
    (lines.field("way", -20, "way"),),
    (
        lines.field("what", -12, "test"),
        lines.field("median", 9, "median", ".4g", "-"),
        lines.field("", -10, "unit"),
        lines.between(17, ".4g"),
        lines.field("first", 7, "first", ".3g", "-"),
        lines.field("MiB", 6, "peak_mib", ".0f", "-"),
        lines.field("CPU ms", 7, "cpu_ms", ".1f", "-"),
        lines.field("W", 5, "power_w", ".0f", "-"),
        lines.field("J", 6, "energy_j", ".0f", "-"),
        lines.Column("PSNR", 6, _psnr),
        lines.field("SSIM", 7, "ssim", ".4f", "-"),
        lines.field("FLIP", 7, "flip", ".4f", "-"),
        lines.field("of 255", 6, "largest", ".0f", "-"),
    ),
    lambda row: "".join(f"  ({text})" for text in (row.slowed, row.note) if text),
    absent="not measured",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="quick", help="default: %(default)s")
    add("--workload", action="append", metavar="TEXT", help="only those with this in their names")
    add("--way", action="append", metavar="TEXT", help="only ways with this in their names")
    add(
        "--model",
        type=Path,
        metavar="PATH",
        help="a checkpoint, or a folder of diffusers (default: random weights of the true shapes)",
    )
    add("--captions", type=Path, metavar="PATH", help="prompts: a text file, a table, a folder")
    add("--clip", type=Path, metavar="DIR", help="a CLIP of transformers, for CLIP scores")
    add("--cards", type=int, default=1, help="GPUs that share the scenarios (default: 1)")
    add_device(parser)
    add_dtype(parser)
    add("--small", action="store_true", help="a try of a minute; the default on a CPU")
    add("--json", type=Path, metavar="FILE", help="write the result here")
    add("--page", type=Path, metavar="DIR", help="write the result, its pictures and a page here")
    add(
        "--against",
        type=Path,
        metavar="FILE",
        help="this card's earlier result: 1 if a picture is slower beyond the spread of both, or "
        "not made any more",
    )


def main(args: argparse.Namespace) -> int:
    """Measure, print, write. 1 where something is slower than --against, 130 if interrupted."""
    check_installed("diffusers", "transformers", "PIL", by="demo")
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    chosen, before = _checked(args)
    device = device_of(args)
    dtype = dtype_of(args, device)
    with folder_cache.lock(LOCK, 0.0) as got:
        if got is False:
            raise UsageError("another suite is running on this machine: their times would be wrong")
        if got is None:
            say("files cannot be locked here: see that no other suite runs on this machine")
        suite = _Suite(args, chosen, device, dtype)
        status = suite.measure()
    whole = [row for row in suite.document.rows if row.test not in PARTS_OF_A_PICTURE]
    for case in dict.fromkeys(row.case for row in whole):
        print(TEXT.under(case, [row for row in whole if row.case == case]), end="\n\n")
    return status or _compared(suite.document, before)


def _checked(args: argparse.Namespace) -> tuple[list[Workload], SuiteDocument | None]:
    """The workloads that are asked for, and the earlier result. Raises UsageError."""
    check_writable(args, "json")
    if args.cards < 1:
        raise UsageError(f"--cards is {args.cards}, it has to be at least 1")
    if args.clip and not args.captions:
        raise UsageError("--clip scores pictures of captions: name them by --captions")
    if args.page:
        try:
            args.page.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--page {told(args.page, error)}") from error
    named = [w for w in WORKLOADS if w.name in PRESETS[args.preset]]
    chosen = [w for w in named if lines.is_named(args.workload, w.name)]
    if not chosen:
        raise UsageError(f"no workload of {args.preset} is left")
    before = None
    if args.against:
        try:
            before = document.read(args.against)
        except (OSError, ValueError) as error:
            raise UsageError(f"--against {told(args.against, error)}") from error
    return chosen, before


def _compared(now: SuiteDocument, before: SuiteDocument | None) -> int:
    """1 where something is slower than before or missing, or the two may not be compared, or
    neither has a picture of ours.
    """
    if before is None:
        return 0
    reasons = document.differences(now, before)
    if now.card != before.card:
        reasons.insert(0, f"card: {now.card} and {before.card}")
    if reasons:
        print(f"not compared with {before.name}: {'; '.join(reasons)}", file=sys.stderr)
        return 1
    if not any(row.way.startswith(page.OURS) for each in (now, before) for row in each.pictures()):
        print(f"neither this run nor {before.name} has a picture of ours", file=sys.stderr)
        return 1
    slower = document.regressions(now, before)
    for line in slower:
        print(f"worse than {before.name}: {line}", file=sys.stderr)
    return int(bool(slower))


class _Suite:
    """A run: its options, what it has measured, the files that it writes."""

    def __init__(
        self, args: argparse.Namespace, chosen: list[Workload], device: torch.device, dtype: str
    ) -> None:
        self.args, self.device, self.dtype = args, device, dtype
        self.small = args.small or device.type == "cpu"
        self.painter = cache(self._painter)
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        if args.cards > count:
            raise UsageError(f"--cards {args.cards}: torch has {count}")
        self._given: Painter | None = None
        if args.model:
            try:
                self._given = loaded_painter(args.model, device, getattr(torch, dtype))
            except ValueError as error:
                raise UsageError(f"--model: {error}") from error
            model = self._given.model
            chosen = [w for w in chosen if w.model in (model, workloads.ESRGAN)]
            if not chosen:
                raise UsageError(f"{args.model.name} is {model}: no workload is of that")
        self.workloads = [w.small() if self.small else w for w in chosen]
        self.prompts = self._prompts()
        self._clip: captions.Clip | None = None
        if args.clip:
            try:
                self._clip = captions.Clip(args.clip)
            except ValueError as error:
                raise UsageError(f"--clip: {error}") from error
        self.document = SuiteDocument(*self._facts())
        self._unwritten = ""

    def _facts(self) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
        now = datetime.now(timezone.utc)
        model = RANDOM if self.args.model is None else self.args.model.name
        about = {
            "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "preset": self.args.preset,
            "model": f"{model}, small" if self.small and self.args.model is None else model,
            "dtype": self.dtype,
            "level": "Auto",
            "kernels": stamp(identify(self.device)),
        }
        name = f"suite-{now.strftime('%Y%m%dT%H%M%SZ')}.json"
        settings = {workload.name: workload.settings() for workload in self.workloads}
        return name, sensors.machine(self.device), about, settings

    def _prompts(self) -> Sequence[str]:
        if self.args.captions is None:
            return PROMPTS
        try:
            return captions.read(self.args.captions)
        except (OSError, ValueError) as error:
            raise UsageError(f"--captions {told(self.args.captions, error)}") from error

    def _painter(self, model: str) -> Painter | Enlarger:
        if model == workloads.ESRGAN:
            return enlarger(self.device, getattr(torch, self.dtype), self.small)
        return self._given or random_painter(
            model, self.device, getattr(torch, self.dtype), self.small
        )

    def _sensors(self) -> sensors.Source | str:
        return sensors.of_device(self.device, identify(self.device))

    def measure(self) -> int:
        """The rows, written as they come. 130 if interrupted."""
        preset = self.args.preset
        turns, pictures = workloads.TURNS[preset], workloads.PICTURES[preset]
        ways = {name: way for name, way in WAYS.items() if lines.is_named(self.args.way, name)}
        if not ways:
            raise UsageError("no way is left")
        plan = Plan(
            self.workloads,
            self.painter,
            ways,
            self._sensors,
            1 if self.small else turns,
            1 if self.small else pictures,
            self.prompts,
            say,
            self._keep,
        )
        status, ended = 0, ""
        try:
            idle = run.idle_power_w(self._sensors(), self.device, 0.1 if self.small else 2.0)
            self.document.machine["idle_power_w"] = idle
            for row in self._rows(plan):
                self.document.rows.append(row)
                self._write(GOES_ON)
        except KeyboardInterrupt:
            status, ended = 130, "interrupted"
        except FAILED as failure:  # a card that is lost fails wherever it is asked something
            status, ended = 1, why(failure)
        if ended:
            say(f"{ended}: the result has the rows so far")
        self.document = replace(self.document, complete=not ended)
        self._write(ended)
        return status

    def _rows(self, plan: Plan) -> Iterator[Row]:
        yield from run.rows(plan)
        if self.args.preset != "quick":
            yield from self._scenarios(plan)
        if self._clip is not None:
            yield from self._scores(plan, self._clip)

    def _scenarios(self, plan: Plan) -> Iterator[Row]:
        """Many pictures of the first such workload, by torch and by all of ours."""
        workload = next((w for w in self.workloads if w.kind == "picture"), None)
        if workload is None:
            return
        requests = 3 if self.small else REQUESTS
        for name in (name for name in SCENARIO_WAYS if name in plan.ways):
            row = Row("offline", workload.name, name, "pictures/s")
            try:
                painter = plan.painters(workload.model)
                assert isinstance(painter, Painter)
                painters = self._copies(painter)
                with _all_by(plan.ways[name], painters):
                    paints = [partial(_paint, each, workload, self.prompts) for each in painters]
                    plan.told(f"{workload.name}: {name}, {requests} requests at once")
                    offline = serving.offline(row, paints, requests, workload.batch)
                    yield offline
                    seconds = len(paints) * workload.batch / offline.median
                    row = replace(row, test="server", unit="s")
                    plan.told(f"{workload.name}: {name}, requests that come at random")
                    yield serving.server(row, paints, requests, seconds)
            except (NotHere, *FAILED) as failure:
                yield replace(row, reason=why(failure))

    def _copies(self, painter: Painter) -> list[Painter]:
        """One for each card."""
        others = (torch.device("cuda", place) for place in range(torch.cuda.device_count()))
        more = [device for device in others if device != painter.device][: self.args.cards - 1]
        return [painter, *(painter.on(device) for device in more)]

    def _scores(self, plan: Plan, clip: captions.Clip) -> Iterator[Row]:
        """CLIP scores of a picture of each caption by each way; ended early, of those so far."""
        for workload in (w for w in self.workloads if w.kind == "picture" and w.batch == 1):
            for name in plan.ways:
                row = Row("CLIP score", workload.name, name, "score")
                scores: list[float] = []
                try:
                    painter = plan.painters(workload.model)
                    with plan.ways[name](painter.pipeline):
                        for place, caption in enumerate(self.prompts):
                            plan.told(f"{name}: caption {place + 1} of {len(self.prompts)}")
                            shot = painter.paint(workload, [caption])
                            if shot.trouble:
                                raise NotHere(f"caption {place + 1}: {shot.trouble}")  # noqa: TRY301 - told as the others are
                            scores += clip.scores(shot.images, [caption], painter.device)
                    yield _mean(row, scores)
                except (NotHere, *FAILED) as failure:
                    yield _mean(row, scores, why(failure))
                except KeyboardInterrupt:
                    yield _mean(row, scores, "interrupted")
                    raise

    def _keep(
        self,
        workload: Workload,
        pictures: Mapping[str, Any],
        distances: Mapping[str, quality.Distance],
    ) -> None:
        """Write a workload's pictures and histograms beside the page."""
        if self.args.page is None:
            return
        place = self.args.page / page.PICTURES / Path(self.document.name).stem
        stem = "".join(c if c.isalnum() or c in ".-" else "_" for c in workload.name)
        try:
            place.mkdir(parents=True, exist_ok=True)
            for name, image in pictures.items():
                image.save(place / f"{stem}--{name.replace(': ', '-').replace(' ', '_')}.png")
            counts = {name: each.histogram for name, each in distances.items()}
            if counts:
                write_whole(place / f"{stem}.svg", quality.drawn(counts))
        except OSError as error:
            self._cannot_write(error)

    def _write(self, incomplete: str) -> None:
        """Write the result as it has grown. A disk that is full is told once; the run goes on."""
        content = {**self.document.as_dict(), "incomplete": incomplete[:MOST_TEXT]}
        try:
            if self.args.json:
                write_json(self.args.json, content)
            if self.args.page:
                write_json(self.args.page / self.document.name, content)
                if incomplete != GOES_ON:
                    documents, _ = document.gathered(self.args.page)
                    say(f"see {page.write(self.args.page, documents)}")
        except (OSError, ValueError) as error:
            self._cannot_write(error)

    def _cannot_write(self, error: OSError | ValueError) -> None:
        reason = getattr(error, "strerror", "") or str(error) or type(error).__name__
        if reason != self._unwritten:
            say(f"what was measured cannot be written: {reason}")
            self._unwritten = reason


def _mean(row: Row, scores: Sequence[float], ended: str = "") -> Row:
    """`row` with the mean of the scores, or why there are none. `ended`: why they are not all."""
    if not scores:
        return replace(row, reason=ended)
    note = f"the mean of {len(scores)} captions" + (f"; ended early: {ended}" if ended else "")
    return replace(row, **{**lines.spread(scores), "median": statistics.mean(scores)}, note=note)


def _paint(painter: Painter, workload: Workload, prompts: Sequence[str], number: int) -> None:
    painter.paint(workload, [prompts[number % len(prompts)]])


@contextmanager
def _all_by(way: Way, painters: Sequence[Painter]) -> Iterator[None]:
    """Within it, all of them work this way."""
    with ExitStack() as stack:
        for painter in painters:
            stack.enter_context(way(painter.pipeline))
        yield


# -- a given model --------------------------------------------------------------------------------


def loaded_painter(path: Path, device: torch.device, dtype: torch.dtype) -> Painter:
    """The pipeline of a folder of diffusers, or of a checkpoint in one file.

    Raises ValueError with the reason where it is neither Stable Diffusion 1 or 2 nor SDXL.
    """
    import diffusers

    kinds = (diffusers.StableDiffusionPipeline, diffusers.StableDiffusionXLPipeline)
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    try:
        pipeline = load(path, dtype) if path.is_dir() else _from_file(path, dtype, *kinds)
    except (OSError, KeyError, ValueError, RuntimeError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path.name} is no checkpoint that diffusers reads: {reason}") from error
    if not isinstance(pipeline, kinds):
        kind = type(pipeline).__name__
        raise ValueError(f"{path.name}: {kind} is not Stable Diffusion's or SDXL's")  # noqa: TRY004 - a file's fault
    config = pipeline.scheduler.config
    pipeline.scheduler = diffusers.EulerDiscreteScheduler.from_config(config)
    pipeline.set_progress_bar_config(disable=True)
    return Painter(
        pipeline.to(device), workloads.SDXL if isinstance(pipeline, kinds[1]) else workloads.SD15
    )


def _from_file(path: Path, dtype: torch.dtype, first: Any, second: Any) -> Any:
    """The pipeline of a checkpoint by the first class, or by the second where that cannot be."""
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"torch_dtype": dtype, "local_files_only": True}
    try:
        return first.from_single_file(str(path), **options)
    except (KeyError, ValueError, TypeError):
        return second.from_single_file(str(path), **options)


# -- ways -----------------------------------------------------------------------------------------


@contextmanager
def _sdp(pipeline: Any) -> Iterator[Callable[[], str]]:
    yield lambda: "torch's scaled_dot_product_attention, its convolutions and products"


class _MethodProcessor(EngineAttnProcessor):
    """Attention by a method of the hosts' own."""

    def __init__(self, replaced: Any, method: Any) -> None:
        super().__init__(replaced, False)
        self._method = method

    def _attend(self, attn: Any, x: torch.Tensor, context: torch.Tensor, mask: Any) -> torch.Tensor:
        q, k, v = (
            item.unflatten(-1, (attn.heads, -1))
            for item in (attn.to_q(x), attn.to_k(context), attn.to_v(context))
        )
        inputs = AttentionInputs(q, k, v, None, None)
        made: torch.Tensor = self._method.run(Call(problem_of(inputs), inputs))
        return made


@contextmanager
def _by_method(method: Any, pipeline: Any) -> Iterator[Callable[[], str]]:
    """The UNet's attention by a method that WebUI users pick."""
    from diffusers.models.attention_processor import Attention

    _check_unet(pipeline)
    own = [part for part in pipeline.unet.modules() if isinstance(part, Attention)]
    before = [part.processor for part in own]
    try:
        for part in own:
            part.processor = _MethodProcessor(part.processor, method)
        yield lambda: f"attention of the UNet: {method.name}, written anew from its description"
    finally:
        for part, processor in zip(own, before, strict=True):
            part.processor = processor


def _check_unet(pipeline: Any) -> None:
    if not hasattr(pipeline, "unet"):
        raise NotHere("an upscaler has no attention")


@contextmanager
def _ours(unet: bool, pipeline: Any) -> Iterator[Callable[[], str]]:
    """Raises NotHere where nothing of ours runs on the device."""
    if not unet:
        _check_unet(pipeline)
    own = getattr(pipeline, "upscaler", None)
    reasons = engine.usable((pipeline.unet if own is None else next(own.parameters())).device)
    if reasons:
        raise NotHere("; ".join(reasons))
    report = Report()
    session = Session.of("Auto", report=report)
    if own is not None:
        pipeline.upscaler = partial(Upscaler(own), session=session.patiently())
        try:
            yield lambda: " ".join(report.summary().split())
        finally:
            pipeline.upscaler = own
        return
    options: dict[str, Any] = {"unet": unet, "vae": unet, "session": session}
    vae, upcast = pipeline.vae, pipeline.vae.config.force_upcast
    with patched(pipeline, wait=True, compare=False, **options):
        try:
            vae.register_to_config(force_upcast=upcast and not unet)  # ours does not overflow
            yield lambda: " ".join(report.summary().split())
        finally:
            vae.register_to_config(force_upcast=upcast)


WAYS: dict[str, Way] = {
    "sdp": _sdp,
    DoggettxLike.name: partial(_by_method, DoggettxLike()),
    SubQuadraticLike.name: partial(_by_method, SubQuadraticLike()),
    f"{page.OURS}: attention": partial(_ours, False),
    page.OURS: partial(_ours, True),
}
"""By their names in a result. `sdp` is diffusers as it is."""
