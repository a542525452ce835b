"""Provides the table of xDiT's transformer families and what the plugin supports in each. Tests check every row."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Transformers with the same attention code."""

    name: str
    names: tuple[str, ...]
    """Names in the registry of the `xdit` runner, without the owners; empty if only scripts use the transformer."""
    small_models: tuple[str, ...]
    """Small models that tests run in exact and in a lossy mode."""
    v_first: tuple[str, ...] = ("to_v",)
    """Paths of the V projections in the attention module."""


_JOINT = ("add_v_proj", "to_v")

FAMILIES = (
    Family("FLUX.1", ("FLUX.1-dev",), ("FLUX.1-dev",), _JOINT),
    Family("FLUX.1 Kontext", ("FLUX.1-Kontext-dev",), ("FLUX.1-Kontext-dev",), _JOINT),
    Family("FLUX.1 control", (), ("FluxControl",), _JOINT),
    Family("FLUX.2", ("FLUX.2-dev",), ("FLUX.2-dev",), (*_JOINT, "to_qkv_mlp_proj")),
    Family(
        "FLUX.2 klein",
        ("FLUX.2-klein-4B", "FLUX.2-klein-9B"),
        ("FLUX.2-klein-4B",),
        (*_JOINT, "to_qkv_mlp_proj"),
    ),
    Family("Stable Diffusion 3.5", ("SD3.5", "stable-diffusion-3.5-large"), ("SD3.5",)),
    Family("Qwen-Image", ("Qwen-Image", "Qwen-Image-2512"), ("Qwen-Image",), _JOINT),
    Family(
        "Qwen-Image-Edit",
        ("Qwen-Image-Edit", "Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511"),
        ("Qwen-Image-Edit",),
        _JOINT,
    ),
    Family("Z-Image", ("Z-Image", "Z-Image-Turbo"), ("ZImage",)),
    Family("Lumina 2", ("Lumina2", "Lumina-Image-2.0"), ("Lumina2",)),
    Family("Krea 2", ("Krea-2-Raw", "Krea-2-Turbo"), ("Krea2",)),
    Family("Ideogram 4", ("Ideogram-4",), ("Ideogram4",)),
    Family("HunyuanDiT", (), ("HunyuanDiT",)),
    Family("PixArt", (), ("PixArt",)),
    Family("Sana", (), ("Sana",)),
    Family("Wan, text to video", ("Wan2.1-T2V",), ("Wan2.1-T2V",)),
    Family("Wan, two experts", ("Wan2.2-T2V", "Wan2.2-I2V", "Wan2.2-Distilled-I2V"), ("Wan2.2-T2V",)),
    Family("Wan, image to video", ("Wan2.1-I2V",), ("Wan2.1-I2V",)),
    Family("Wan, text and image to video", ("Wan2.2-TI2V",), ("Wan2.2-TI2V",)),
    Family("Wan VACE", ("Wan2.1-VACE-1.3B", "Wan2.1-VACE-14B"), ("Wan2.1-VACE-1.3B",)),
    Family("Causal Wan", ("CausalWan",), ()),  # no all-to-alls: K and V of all frames are on every rank
    Family("HunyuanVideo", ("HunyuanVideo",), ("HunyuanVideo",), _JOINT),
    Family(
        "HunyuanVideo 1.5",
        ("Hunyuanvideo-1.5", "Hunyuanvideo-1.5-Distilled", "Hunyuanvideo-1.5-Sparse"),
        ("Hunyuanvideo-1.5",),
        _JOINT,
    ),
    Family("LTX-2", ("LTX-2", "LTX-2.3", "LTX-2.5", "LTX-2.5-distilled", "LTX-2.5-full"), ("LTX2",)),
    Family("MiniMax-H3", ("MiniMax-H3", "MiniMax-H3-Ref2VA", "FastH3", "FastH3-Dense"), ("MiniMaxH3",), ("to_qkv",)),
    Family("Cosmos 3", ("Cosmos3-Nano", "Cosmos3-Super"), ("Cosmos3",), _JOINT),
    Family("LingBot-Video", ("LingBot-Video-Dense", "LingBot-Video-MoE"), ("LingBotVideo",)),
    Family("CogVideoX", (), ("CogVideoX",)),
    Family("ConsisID", (), ("ConsisID",)),
    Family("Latte", (), ("Latte",)),
    Family("StepVideo", (), ("StepVideo",), ("wqkv",)),
)


COLUMNS = ("family", "names in xDiT's registry")


def cells() -> list[tuple[str, ...]]:
    """Return the families as table cells, one tuple per family in the order of :data:`COLUMNS`."""
    return [(family.name, ", ".join(family.names) or "scripts only") for family in FAMILIES]
