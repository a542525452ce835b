"""Provides the table of xDiT's transformer families and what the plugin supports in each. Tests check every row."""

from dataclasses import dataclass
from typing import Literal

TRANSFORMER_TESTS = "tests/xdit/test_transformers.py"
"""Test file that compares small transformers with stock xDiT bit by bit, unless they are in PIPELINE_TESTS."""
LOOP_TESTS = "tests/xdit/test_run_loops.py"
"""Test file of pipelines with custom denoising loops, in exact and lossy modes."""


@dataclass(frozen=True)
class Family:
    """Transformers with the same attention code."""

    name: str
    names: tuple[str, ...]
    """Names in the registry of the `xdit` runner, without the owners; empty if only scripts use the transformer."""
    small_models: tuple[str, ...]
    """Small models that tests run."""
    small_pipelines: tuple[str, ...] = ()
    """Small pipelines with custom denoising loops that tests run."""
    attention: Literal["usp", "yunchang", "own"] = "usp"
    """Attention that runs the all-to-alls: xDiT's USP, yunchang's, or a custom one without all-to-alls."""
    v_first: tuple[str, ...] | str = ("to_v",)
    """Paths of the V projections in the attention module, or the reason why V-First is unsupported."""
    lossy: bool | str = True
    """Whether lossy modes compress all messages, or the reason why not."""

    @property
    def is_exact(self) -> bool:
        """Whether exact mode runs all-to-alls with bit-identical results."""
        return self.attention != "own"

    @property
    def tested(self) -> str:
        """Test files of exact mode and the small models in them."""
        tests = []
        if self.small_models:
            tests.append((PIPELINE_TESTS.get(self.small_models[0], TRANSFORMER_TESTS), self.small_models))
        if self.small_pipelines:
            tests.append((LOOP_TESTS, self.small_pipelines))
        return "; ".join(f"{file}: {', '.join(names)}" for file, names in tests) or "-"


PIPELINE_TESTS = {
    **dict.fromkeys(("FLUX.1-dev", "FLUX.2-dev", "SD3.5", "Qwen-Image"), "tests/xdit/test_pipelines.py"),
    **dict.fromkeys(
        ("FLUX.1-Kontext-dev", "Qwen-Image-Edit", "Wan2.1-I2V", "Wan2.2-TI2V", "Wan2.1-VACE-1.3B"),
        "tests/xdit/test_more_pipelines.py",
    ),
}
"""Test file of each small model that is tested as a whole pipeline."""
_JOINT = ("add_v_proj", "to_v")
_NO_ALL_TO_ALL = "K and V of all frames are replicated on every rank; there are no all-to-alls"

FAMILIES = (
    Family("FLUX.1", ("FLUX.1-dev",), ("FLUX.1-dev",), v_first=_JOINT),
    Family("FLUX.1 Kontext", ("FLUX.1-Kontext-dev",), ("FLUX.1-Kontext-dev",), v_first=_JOINT),
    Family("FLUX.1 control", (), ("FluxControl",), v_first=_JOINT),
    Family("FLUX.2", ("FLUX.2-dev",), ("FLUX.2-dev",), v_first=(*_JOINT, "to_qkv_mlp_proj")),
    Family("FLUX.2 klein", ("FLUX.2-klein-4B", "FLUX.2-klein-9B"), ("Klein",), v_first=(*_JOINT, "to_qkv_mlp_proj")),
    Family(
        "Stable Diffusion 3.5",
        ("SD3.5", "stable-diffusion-3.5-large"),
        ("SD3.5",),
        small_pipelines=("SD3",),
    ),
    Family("Qwen-Image", ("Qwen-Image", "Qwen-Image-2512"), ("Qwen-Image",), v_first=_JOINT),
    Family(
        "Qwen-Image-Edit",
        ("Qwen-Image-Edit", "Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511"),
        ("Qwen-Image-Edit",),
        v_first=_JOINT,
    ),
    Family("Z-Image", ("Z-Image", "Z-Image-Turbo"), ("ZImage", "ZImageSixHeads")),
    Family("Lumina 2", ("Lumina2", "Lumina-Image-2.0"), ("Lumina2",)),
    Family("Krea 2", ("Krea-2-Raw", "Krea-2-Turbo"), ("Krea2", "Krea2Masked")),
    Family("Ideogram 4", ("Ideogram-4",), ("Ideogram4",)),
    Family("HunyuanDiT", (), ("HunyuanDiT",)),
    Family("PixArt", (), (), small_pipelines=("PixArtAlpha",)),
    Family("Sana", (), ("Sana",), attention="yunchang"),
    Family("Wan, text to video", ("Wan2.1-T2V",), ("Wan",)),
    Family("Wan, two experts", ("Wan2.2-T2V", "Wan2.2-I2V", "Wan2.2-Distilled-I2V"), ("WanA14B",)),
    Family("Wan, image to video", ("Wan2.1-I2V",), ("Wan2.1-I2V",)),
    Family("Wan, text and image to video", ("Wan2.2-TI2V",), ("Wan2.2-TI2V",)),
    Family("Wan VACE", ("Wan2.1-VACE-1.3B", "Wan2.1-VACE-14B"), ("Wan2.1-VACE-1.3B",)),
    Family("Causal Wan", ("CausalWan",), (), attention="own", v_first=_NO_ALL_TO_ALL, lossy=_NO_ALL_TO_ALL),
    Family("HunyuanVideo", ("HunyuanVideo",), ("HunyuanVideo",), v_first=_JOINT),
    Family(
        "HunyuanVideo 1.5",
        ("Hunyuanvideo-1.5", "Hunyuanvideo-1.5-Distilled", "Hunyuanvideo-1.5-Sparse"),
        ("HunyuanVideo15",),
        v_first=_JOINT,
    ),
    Family("LTX-2", ("LTX-2", "LTX-2.3", "LTX-2.5", "LTX-2.5-distilled", "LTX-2.5-full"), ("LTX2",)),
    Family(
        "MiniMax-H3",
        ("MiniMax-H3", "MiniMax-H3-Ref2VA", "FastH3", "FastH3-Dense"),
        ("MiniMaxH3", "MiniMaxH3Fused"),
        small_pipelines=("MiniMaxH3", "MiniMaxH3Ref2VA"),
        v_first=("to_qkv", "to_v"),
    ),
    Family("Cosmos 3", ("Cosmos3-Nano", "Cosmos3-Super"), ("Cosmos3",), v_first=_JOINT),
    Family(
        "LingBot-Video",
        ("LingBot-Video-Dense", "LingBot-Video-MoE"),
        (),
        small_pipelines=("LingBotVideo",),
    ),
    Family("CogVideoX", (), ("CogVideoX",)),
    Family("ConsisID", (), ("ConsisID",)),
    Family("Latte", (), ("Latte",)),
    Family("StepVideo", (), ("StepVideo",), attention="yunchang", v_first=("wqkv",)),
)


COLUMNS = ("family", "names in xDiT's registry")


def cells() -> list[tuple[str, ...]]:
    """Return the families as table cells, one tuple per family in the order of :data:`COLUMNS`."""
    return [(family.name, ", ".join(family.names) or "scripts only") for family in FAMILIES]
