"""Random inputs for a model, from the names of the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from shrink import FIRST_ID, FIRST_TOKEN

# Patches of an image that is given as a grid, a multiple of what models merge.
BATCH, LENGTH, TARGETS, GRID, FRAMES = 2, 12, 7, 4, 2
# Samples or frames of a recording.
SAMPLES, MELS = 3200, 128

Given = dict[str, Any]


def first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes that the configuration has, with a value."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    return default


def part(config: Any, *names: str) -> Any:
    return first(config, *names, default=config)


def vision_of(config: Any) -> Any:
    return part(config, "vision_config", "vision_encoder_config", "backbone_config", "image_config")


def audio_of(config: Any) -> Any:
    return part(config, "audio_config", "audio_encoder_config", "encoder_config", "speech_config")


def text_of(config: Any) -> Any:
    """The part with the vocabulary of the decoder, where there are two."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def tokens(config: Any, length: int = LENGTH) -> torch.Tensor:
    text = text_of(config)
    vocabulary = first(text, "vocab_size", default=FIRST_ID)
    low, high = min(FIRST_TOKEN, vocabulary // 2), min(vocabulary, FIRST_ID)
    ids = torch.randint(low, high, (BATCH, length))
    # Some take the result at the end of the text, which they know by this token or the largest.
    end = first(text, "eos_token_id", default=0)
    ids[:, -1] = end if isinstance(end, int) and high <= end < vocabulary else high - 1
    return ids


def _pair(x: Any) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else tuple(x)[-2:]


def image(config: Any, *before: int) -> torch.Tensor:
    """(batch, *before, channels, height, width)."""
    vision = vision_of(config)
    channels = first(vision, "num_channels", "in_channels", default=3)
    channels = channels if isinstance(channels, int) else 3
    size = first(vision, "image_size", "img_size", "pretrain_img_size", "input_size", default=64)
    return torch.randn(BATCH, *before, channels, *_pair(size))


def patches(config: Any) -> torch.Tensor:
    """(batch * patches, numbers of a patch), as models with a grid take images."""
    vision = vision_of(config)
    size, frames = first(vision, "patch_size"), first(vision, "temporal_patch_size", default=1)
    channels = first(vision, "num_channels", "in_channels", "in_chans", default=3)
    height, width = _pair(size)
    frames = frames if isinstance(frames, int) else frames[0]
    return torch.randn(BATCH * GRID * GRID, channels * frames * height * width)


def _ids(length: int) -> torch.Tensor:
    return torch.zeros(BATCH, length, dtype=torch.long)


def boxes(_: Any) -> torch.Tensor:
    """Of each token: left, top, right, bottom."""
    corner = torch.randint(0, 30, (BATCH, LENGTH, 2))
    return torch.cat([corner, corner + torch.randint(1, 30, corner.shape)], -1)


def grid(*_: Any) -> torch.Tensor:
    return torch.tensor([[1, GRID, GRID]] * BATCH)


def past(config: Any) -> torch.Tensor:
    length = first(config, "context_length") + max(first(config, "lags_sequence", default=[0]))
    return torch.randn(BATCH, length)


# Arguments that are always given where forward has them.
KNOWN: dict[str, Callable[[Any], Any]] = {
    "input_ids": tokens,
    "attention_mask": lambda _: torch.ones(BATCH, LENGTH, dtype=torch.long),
    "decoder_input_ids": lambda config: tokens(config, TARGETS),
    "bbox": boxes,
    "grid_thw": grid,
}


def images(config: Any, names: Any) -> Iterator[Given]:
    """Ways to give one image for each row."""
    vision = vision_of(config)
    if "image_grid_thw" in names:
        yield {"pixel_values": patches(config), "image_grid_thw": grid()}
        return
    height, width = _pair(first(vision, "image_size", default=64))
    sizes = torch.tensor([[height, width]] * BATCH)
    yield {"pixel_values": image(config)}
    yield {"pixel_values": image(config), "image_sizes": sizes}
    yield {"pixel_values": image(config, 1)}
    yield {"pixel_values": image(config, 3), "image_sizes": sizes}


def recordings(config: Any) -> Iterator[Given]:
    audio = audio_of(config)
    bins = first(
        *(audio, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim"),
        default=80,
    )
    bins = bins if isinstance(bins, int) else 80
    longest = 2 * first(audio, "max_source_positions", default=MELS // 2)
    for shape in ((MELS, bins), (bins, MELS), (bins, longest), (1, SAMPLES), (SAMPLES,)):
        x = torch.randn(BATCH, *shape)
        for name in ("input_features", "input_values", "audio_mel"):
            length = MELS if shape[0] == MELS or shape[-1] == MELS else shape[-1]
            yield {
                name: x,
                "input_features_mask": torch.ones(BATCH, length, dtype=torch.long),
                "audio_mel_mask": torch.zeros(BATCH, length, dtype=torch.bool),
                "padding_mask": torch.ones(BATCH, length, dtype=torch.long),
            }


def videos(config: Any) -> Iterator[Given]:
    frames = first(vision_of(config), "num_frames", "frames_per_clip", default=FRAMES)
    for name in "pixel_values", "pixel_values_videos":
        yield {name: image(config, frames)}


def with_image(model: Any, config: Any, names: Any, text: Given) -> Iterator[Given]:
    """Text in which an image has its places."""
    token = first(config, "image_token_id", "image_token_index", "media_placeholder_token_id")
    if token is None or not hasattr(model, "get_image_features"):
        return
    takes = inspect.signature(model.get_image_features).parameters
    for given in images(config, names):
        given = {name: x for name, x in given.items() if name in names}
        try:
            with torch.no_grad():
                found = model.get_image_features(**{k: x for k, x in given.items() if k in takes})
            found = getattr(found, "pooler_output", found)
            found = (
                torch.cat([x.flatten(0, -2) for x in found])
                if isinstance(found, (list, tuple))
                else found.flatten(0, -2)
            )
        except Exception:
            continue
        n = len(found) // BATCH
        if n * BATCH != len(found):
            continue
        half = LENGTH // 2
        marks = torch.full((BATCH, n), token)
        ids = torch.cat([text["input_ids"][:, :half], marks, text["input_ids"][:, half:]], 1)
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in names:
            given["mm_token_type_ids"] = (ids == token).long()
        if "token_type_ids" in names:
            given["token_type_ids"] = (ids == token).long()
        yield text | given


def candidates(model: Any, config: Any, hint: dict[str, Any]) -> Iterator[Given]:
    """Arguments that the model may take, the fullest first, with those of the hint."""
    more = {name: make(config) for name, make in hint.get("give", {}).items()}
    if hint.get("alone"):
        yield more
        return
    for given in _candidates(model, config):
        yield given | more
    yield more


def _candidates(model: Any, config: Any) -> Iterator[Given]:
    names = inspect.signature(model.forward).parameters

    def named(given: Given) -> Given:
        return {name: x for name, x in given.items() if name in names}

    known = {name: make(config) for name, make in KNOWN.items() if name in names}
    if "input_ids" in names:
        yield from with_image(model, config, names, known)
        if "pixel_values" in names:
            for given in images(config, names):
                yield known | named(given)
        if "pixel_values_videos" in names and "pixel_values" not in names:
            for given in videos(config):
                yield known | named(given)
        if "input_features" in names or "input_values" in names:
            for given in recordings(config):
                yield known | named(given)
        yield known
    known = {name: x for name, x in known.items() if name != "attention_mask"}
    if "grid_thw" in names:
        main = "hidden_states" if "hidden_states" in names else "pixel_values"
        yield known | {main: patches(config)}
    if "past_values" in names:
        yield known | named({"past_values": past(config)})
    if "pixel_values" in names or "pixel_values_videos" in names:
        for given in (*images(config, names), *videos(config)):
            yield known | named(given)
    for given in recordings(config):
        if any(name in names for name in ("input_features", "input_values", "audio_mel")):
            yield known | named(given)
