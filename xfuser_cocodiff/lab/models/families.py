"""What the plugin does in each family of transformers that xDiT has. Tests check every row against what happens."""

from dataclasses import dataclass
from typing import Any, Literal

TRANSFORMERS = "tests/xdit/test_transformers.py"
"""Where small transformers are compared with stock xDiT bit for bit; :data:`PIPELINES` as whole pipelines."""
LOOPS = "tests/xdit/test_run_loops.py"
"""Where the loops that pipelines have of their own are, and modes that approximate in them."""


@dataclass(frozen=True)
class Family:
    """Transformers that are alike."""

    name: str
    names: tuple[str, ...]
    """In the registry of the `xdit` runner, without those of their owners; none where only scripts use them."""
    small: tuple[str, ...]
    """The small models that tests run."""
    loops: tuple[str, ...] = ()
    """The small pipelines that tests run in loops of their own, beside those of xDiT's runner."""
    attention: Literal["usp", "yunchang", "own"] = "usp"
    """What of xDiT exchanges: USP, yunchang's attention, or nothing of it."""
    v_first: tuple[str, ...] | str = ("to_v",)
    """The projections that V comes from, in the attention module; or why V does not go first."""
    coded: bool | str = True
    """Whether modes that approximate act on all its exchanges; or why not."""

    @property
    def is_exact(self) -> bool:
        """Whether exact mode moves something, and has the bits of stock."""
        return self.attention != "own"

    @property
    def tested(self) -> str:
        """Tests of its exact mode."""
        models = [(PIPELINES.get(self.small[0], TRANSFORMERS), self.small)] if self.small else []
        loops = [(LOOPS, self.loops)] if self.loops else []
        return "; ".join(f"{file}: {', '.join(names)}" for file, names in models + loops) or "-"


PIPELINES = {
    **dict.fromkeys(("FLUX.1-dev", "FLUX.2-dev", "SD3.5", "Qwen-Image"), "tests/xdit/test_pipelines.py"),
    **dict.fromkeys(
        ("FLUX.1-Kontext-dev", "Qwen-Image-Edit", "Wan2.1-I2V", "Wan2.2-TI2V", "Wan2.1-VACE-1.3B"),
        "tests/xdit/test_more_pipelines.py",
    ),
}
"""Small models that tests run as pipelines, and where."""
_BOTH = ("add_v_proj", "to_v")
_WRAPPED = ("module.to_v",)
_NOTHING_MOVES = "it keeps K and V of all frames on every rank and exchanges nothing"

FAMILIES = (
    Family("FLUX.1", ("FLUX.1-dev",), ("FLUX.1-dev",), v_first=_BOTH),
    Family("FLUX.1 Kontext", ("FLUX.1-Kontext-dev",), ("FLUX.1-Kontext-dev",), v_first=_BOTH),
    Family("FLUX.1 control", (), ("FluxControl",), v_first=("module.add_v_proj", "module.to_v")),
    Family("FLUX.2", ("FLUX.2-dev",), ("FLUX.2-dev",), v_first=(*_BOTH, "to_qkv_mlp_proj")),
    Family("FLUX.2 klein", ("FLUX.2-klein-4B", "FLUX.2-klein-9B"), ("Klein",), v_first=(*_BOTH, "to_qkv_mlp_proj")),
    Family(
        "Stable Diffusion 3.5", ("SD3.5", "stable-diffusion-3.5-large"), ("SD3.5",), loops=("SD3",), v_first=_WRAPPED
    ),
    Family("Qwen-Image", ("Qwen-Image", "Qwen-Image-2512"), ("Qwen-Image",), v_first=_BOTH),
    Family(
        "Qwen-Image-Edit",
        ("Qwen-Image-Edit", "Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511"),
        ("Qwen-Image-Edit",),
        v_first=_BOTH,
    ),
    Family("Z-Image", ("Z-Image", "Z-Image-Turbo"), ("ZImage", "ZImageSixHeads")),
    Family("Lumina 2", ("Lumina2", "Lumina-Image-2.0"), ("Lumina2",)),
    Family("Krea 2", ("Krea-2-Raw", "Krea-2-Turbo"), ("Krea2", "Krea2Masked")),
    Family("Ideogram 4", ("Ideogram-4",), ("Ideogram4",)),
    Family("HunyuanDiT", (), ("HunyuanDiT",), v_first=_WRAPPED),
    Family("PixArt", (), (), loops=("PixArtAlpha",), v_first=_WRAPPED),
    Family("Sana", (), ("Sana",), attention="yunchang", v_first=_WRAPPED),
    Family("Wan, text to video", ("Wan2.1-T2V",), ("Wan",)),
    Family("Wan, two experts", ("Wan2.2-T2V", "Wan2.2-I2V", "Wan2.2-Distilled-I2V"), ("WanA14B",)),
    Family("Wan, image to video", ("Wan2.1-I2V",), ("Wan2.1-I2V",)),
    Family("Wan, text and image to video", ("Wan2.2-TI2V",), ("Wan2.2-TI2V",)),
    Family("Wan VACE", ("Wan2.1-VACE-1.3B", "Wan2.1-VACE-14B"), ("Wan2.1-VACE-1.3B",)),
    Family("Causal Wan", ("CausalWan",), (), attention="own", v_first=_NOTHING_MOVES, coded=_NOTHING_MOVES),
    Family("HunyuanVideo", ("HunyuanVideo",), ("HunyuanVideo",), v_first=_BOTH),
    Family(
        "HunyuanVideo 1.5",
        ("Hunyuanvideo-1.5", "Hunyuanvideo-1.5-Distilled", "Hunyuanvideo-1.5-Sparse"),
        ("HunyuanVideo15",),
        v_first=_BOTH,
    ),
    Family("LTX-2", ("LTX-2", "LTX-2.3", "LTX-2.5", "LTX-2.5-distilled", "LTX-2.5-full"), ("LTX2",)),
    Family(
        "MiniMax-H3",
        ("MiniMax-H3", "MiniMax-H3-Ref2VA", "FastH3", "FastH3-Dense"),
        ("MiniMaxH3", "MiniMaxH3Fused"),
        loops=("MiniMaxH3", "MiniMaxH3Ref2VA"),
        v_first=("to_qkv", "to_v"),
    ),
    Family("Cosmos 3", ("Cosmos3-Nano", "Cosmos3-Super"), ("Cosmos3",), v_first=_BOTH),
    Family(
        "LingBot-Video",
        ("LingBot-Video-Dense", "LingBot-Video-MoE"),
        (),
        loops=("LingBotVideo",),
    ),
    Family("CogVideoX", (), ("CogVideoX",), v_first=_WRAPPED),
    Family("ConsisID", (), ("ConsisID",), v_first=_WRAPPED),
    Family("Latte", (), ("Latte",), v_first=_WRAPPED),
    Family("StepVideo", (), ("StepVideo",), attention="yunchang", v_first=("wqkv",)),
)


def rows() -> list[dict[str, Any]]:
    """The families as rows of a record."""
    return [
        {
            "family": family.name,
            "names": list(family.names),
            "attention": family.attention,
            "exact": family.is_exact,
            "v_first": family.v_first if isinstance(family.v_first, str) else list(family.v_first),
            "coded": family.coded,
            "loops": list(family.loops),
            "tested": family.tested,
        }
        for family in FAMILIES
    ]


COLUMNS = (
    "family",
    "names in xDiT's registry",
    "attention",
    "exact mode",
    "V projections",
    "lossy modes",
    "small models in tests",
)


def cells() -> list[tuple[str, ...]]:
    """The families as cells under :data:`COLUMNS`."""
    return [
        (
            family.name,
            ", ".join(family.names) or "scripts only",
            {"usp": "USP", "yunchang": "yunchang", "own": "own"}[family.attention],
            "bit-identical" if family.is_exact else "no all-to-all",
            "no" if isinstance(family.v_first, str) else ", ".join(family.v_first),
            "yes" if family.coded is True else "no",
            ", ".join(family.small or family.loops) or "-",
        )
        for family in FAMILIES
    ]
