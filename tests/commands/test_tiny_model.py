"""The little model: what it is made of, and that its pictures show what the prompts say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from diffusers.models.attention_processor import Attention
from safetensors import safe_open

from lib_rocm_sd.commands import little_model
from tests.commands.tiny_model import pipeline
from tools import shapes, tiny_tokenizer, train_tiny_sd

__all__ = ["pipeline"]

SIZE = 128


def scenes(count: int) -> shapes.Scenes:
    return shapes.random_scenes(count, torch.Generator().manual_seed(1))


# --- what it is made of


def test_it_is_small_and_in_half_precision() -> None:
    files = [file for file in little_model.MODEL.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 16_000_000
    weights = [file for file in files if file.suffix == ".safetensors"]
    assert len(weights) == 3
    for file in weights:
        with safe_open(str(file), "pt") as tensors:
            assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118


def test_its_head_dims_are_those_of_stable_diffusion(pipeline: Any) -> None:
    dims = [
        module.to_q.out_features // module.heads
        for module in pipeline.unet.modules()
        if isinstance(module, Attention)
    ]
    assert sorted(set(dims)) == [40, 80, 160]
    assert len(dims) == 14


def test_its_tensors_have_the_names_of_stable_diffusion() -> None:
    with safe_open(str(little_model.MODEL / "text_encoder" / "model.safetensors"), "pt") as tensors:
        names = set(tensors.keys())
    assert "text_model.encoder.layers.0.self_attn.q_proj.weight" in names
    with safe_open(
        str(little_model.MODEL / "vae" / "diffusion_pytorch_model.safetensors"), "pt"
    ) as file:
        assert "decoder.mid_block.attentions.0.to_q.weight" in set(file.keys())


def test_the_text_states_have_a_mean(pipeline: Any) -> None:
    """WebUIs divide by it."""
    norms = [m for m in pipeline.text_encoder.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert norms[-1].bias.abs().mean() > 1e-3
    ids = pipeline.tokenizer(["a red circle", ""], padding="max_length", return_tensors="pt")
    states = pipeline.text_encoder(ids.input_ids).last_hidden_state
    assert states.shape == (2, 77, 96)
    assert (states.mean((1, 2)).abs() > 1e-4).all()


def test_the_log_of_its_training_lies_beside_it() -> None:
    log = json.loads((little_model.MODEL / "training.json").read_text(encoding="utf-8"))
    losses = log["losses"]["denoiser"]
    assert losses[-1]["loss"] < 0.1 < losses[0]["loss"]
    assert log["arguments"]["seed"] == 0


# --- words


def test_every_word_is_one_token(pipeline: Any) -> None:
    for word in shapes.words():
        assert len(pipeline.tokenizer(word).input_ids) == 3, word


def test_captions_have_the_same_ids_on_the_gpu_and_in_the_tokenizer(pipeline: Any) -> None:
    some = scenes(200)
    expected = pipeline.tokenizer(shapes.captions(some), padding="max_length", return_tensors="pt")
    captioner = shapes.Captioner(
        tiny_tokenizer.word_ids(shapes.words()), torch.device("cpu"), tiny_tokenizer.LENGTH
    )
    assert torch.equal(captioner(some), expected.input_ids)
    nothing = pipeline.tokenizer("", padding="max_length", return_tensors="pt").input_ids
    assert torch.equal(captioner.empty(1), nothing)


def test_any_text_is_tokenized(pipeline: Any) -> None:
    ids = pipeline.tokenizer("A Photo, of é 犬 🙂 circles!").input_ids
    assert max(ids[:-1]) < tiny_tokenizer.vocabulary_of(shapes.words())[tiny_tokenizer.END]
    assert len(ids) > 10


# --- pictures, seen by their colours and outlines


@dataclass(frozen=True)
class Seen:
    """One shape in a picture: where its middle is and how far it reaches, 0 to 1, y downwards."""

    shape: str
    x: float
    y: float
    width: float


def palette() -> np.ndarray[Any, Any]:
    return np.array([*shapes.COLOURS.values(), shapes.PLAIN])


def colour_map(picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For each pixel the nearest of COLOURS, by index; the one after them is the plain ground."""
    gaps = ((picture[:, :, None] - palette()) ** 2).sum(-1)
    return gaps.argmin(-1)


def outline(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The mask cut to its bounding box and stretched to 32 x 32."""
    rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
    cut = torch.from_numpy(
        mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.float32)
    )
    return torch.nn.functional.interpolate(cut[None, None], (32, 32), mode="area")[0, 0].numpy()


def ideal() -> dict[str, np.ndarray[Any, Any]]:
    """The outline of each shape as the data has it."""
    zero = torch.zeros(len(shapes.SHAPES), dtype=torch.int64)
    columns = {name: zero for name in shapes.FIELDS}
    columns["shape0"] = torch.arange(len(shapes.SHAPES))
    columns["size0"], columns["ground"] = zero + 2, zero + 6
    drawn = shapes.render(shapes.Scenes(columns), torch.Generator().manual_seed(0), SIZE)
    pictures = (drawn.permute(0, 2, 3, 1).numpy() + 1) / 2
    return {
        name: outline(colour_map(picture) == 0)
        for name, picture in zip(shapes.SHAPES, pictures, strict=True)
    }


def look(picture: np.ndarray[Any, Any], colour: str) -> Seen:
    """The shape of this colour: its kind is the one whose outline overlaps most."""
    mask = colour_map(picture) == list(shapes.COLOURS).index(colour)
    assert mask.sum() > 60, f"nothing is {colour}"
    rows, columns = np.nonzero(mask)
    found = outline(mask)
    overlap = {
        name: np.minimum(found, whole).sum() / np.maximum(found, whole).sum()
        for name, whole in ideal().items()
    }
    return Seen(
        max(overlap, key=lambda name: overlap[name]),
        columns.mean() / SIZE,
        rows.mean() / SIZE,
        (columns.max() - columns.min() + 1) / SIZE,
    )


def ground(picture: np.ndarray[Any, Any]) -> str:
    """The colour of most of the picture's rim."""
    seen = colour_map(picture)
    rim = np.concatenate([seen[:4].ravel(), seen[-4:].ravel(), seen[:, :4].ravel()])
    return [*shapes.COLOURS, "plain"][int(np.bincount(rim).argmax())]


PROMPTS = (
    "a red circle left of a blue square",
    "a big yellow star on a blue background",
    "a small green triangle above a big orange ring",
    "a white cross on the right on a red background",
    "a purple heart at the bottom on a yellow background",
    "a small white circle inside a red square on a green background",
)


@pytest.fixture(scope="module")
def pictures(pipeline: Any) -> dict[str, np.ndarray[Any, Any]]:
    made = pipeline(
        list(PROMPTS),
        num_inference_steps=12,
        guidance_scale=little_model.GUIDANCE,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))],
        output_type="np",
    ).images
    return dict(zip(PROMPTS, made, strict=True))


def test_the_eye_of_these_tests_sees_the_data_right() -> None:
    some = scenes(60)
    drawn = (shapes.render(some, torch.Generator().manual_seed(2)).permute(0, 2, 3, 1) + 1) / 2
    right = []
    for index, picture in enumerate(drawn.numpy()):
        row = {name: int(column[index]) for name, column in some.columns.items()}
        if row["relation"] == 0:
            seen = look(picture, list(shapes.COLOURS)[row["colour0"]])
            right.append(seen.shape == shapes.SHAPES[row["shape0"]])
            assert ground(picture) == [*shapes.COLOURS, "plain"][row["ground"]]
    assert len(right) > 20
    assert all(right)


def test_left_of(pictures: dict[str, Any]) -> None:
    picture = pictures[PROMPTS[0]]
    circle, square = look(picture, "red"), look(picture, "blue")
    assert (circle.shape, square.shape) == ("circle", "square")
    assert circle.x < 0.45 < 0.55 < square.x
    assert ground(picture) == "plain"


def test_a_background(pictures: dict[str, Any]) -> None:
    picture = pictures[PROMPTS[1]]
    star = look(picture, "yellow")
    assert star.shape == "star"
    assert star.width > 0.35
    assert ground(picture) == "blue"


def test_above_and_sizes(pictures: dict[str, Any]) -> None:
    picture = pictures[PROMPTS[2]]
    triangle, ring = look(picture, "green"), look(picture, "orange")
    assert (triangle.shape, ring.shape) == ("triangle", "ring")
    assert triangle.y < ring.y - 0.25
    assert triangle.width < 0.75 * ring.width


def test_on_the_right(pictures: dict[str, Any]) -> None:
    cross = look(pictures[PROMPTS[3]], "white")
    assert cross.shape == "cross"
    assert cross.x > 0.6
    assert ground(pictures[PROMPTS[3]]) == "red"


def test_at_the_bottom(pictures: dict[str, Any]) -> None:
    heart = look(pictures[PROMPTS[4]], "purple")
    assert heart.shape == "heart"
    assert heart.y > 0.6
    assert ground(pictures[PROMPTS[4]]) == "yellow"


def test_inside(pictures: dict[str, Any]) -> None:
    picture = pictures[PROMPTS[5]]
    circle, square = look(picture, "white"), look(picture, "red")
    assert circle.width < 0.5 * square.width
    assert abs(circle.x - square.x) < 0.08
    assert abs(circle.y - square.y) < 0.08
    assert ground(picture) == "green"


def test_the_autoencoder_gives_back_what_it_got(pipeline: Any) -> None:
    drawn = shapes.render(scenes(8), torch.Generator().manual_seed(3))
    with torch.no_grad():
        back = pipeline.vae.decode(pipeline.vae.encode(drawn).latent_dist.mean).sample
    noise_db = 10 * torch.log10(4 / (back - drawn).square().mean((1, 2, 3)))
    assert noise_db.min() > 25
    assert noise_db.mean() > 30


# --- the training script


def test_a_step_of_training_makes_a_pipeline(tmp_path: Path) -> None:
    steps = ["--vae-steps", "1", "--vae-batch", "2", "--unet-steps", "1", "--unet-batch", "2"]
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--pool", "8", "--log-every", "1"]
    state = torch.random.get_rng_state()
    assert train_tiny_sd.main(arguments + steps) == 0
    torch.random.set_rng_state(state)
    log = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert len(log["losses"]["autoencoder"]) == len(log["losses"]["denoiser"]) == 1
    made = little_model.load(tmp_path, torch.float32)
    image = made("a red circle", num_inference_steps=1, output_type="np").images[0]
    assert image.shape == (SIZE, SIZE, 3)
    names = {file.relative_to(tmp_path) for file in tmp_path.rglob("*")}
    assert names == {file.relative_to(little_model.MODEL) for file in little_model.MODEL.rglob("*")}
