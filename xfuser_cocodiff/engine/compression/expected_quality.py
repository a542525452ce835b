"""PSNR that a run of a mode may expect: those of the small trained models over as many steps.

Other models have other errors: the figures say what to look for, and `cocodiff quality --model` measures it.
"""

from typing import NamedTuple


class _Psnr(NamedTuple):
    """Mean PSNR to lossless runs in dB over 8 or 16 seeds, bf16, 2x2 virtual ranks; see docs/quality.md."""

    gathered: float
    """With K and V gathered along the slow axes."""
    by_heads: float
    """With Q, K, V and O in all-to-alls by heads."""


UNGUIDED, GUIDED = ("FLUX.1-dev",), ("SD3.5", "Wan2.1-T2V")
"""Models that were measured without and with guidance."""
MEASURED: dict[tuple[str, str], dict[int, _Psnr]] = {
    ("FLUX.1-dev", "balanced"): {
        4: _Psnr(54.4, 48.9),
        8: _Psnr(54.2, 51.5),
        20: _Psnr(54.0, 50.5),
        50: _Psnr(56.3, 55.8),
    },
    ("FLUX.1-dev", "fast"): {4: _Psnr(46.1, 40.2), 8: _Psnr(50.8, 45.4), 20: _Psnr(50.7, 44.6), 50: _Psnr(53.8, 49.7)},
    ("SD3.5", "balanced"): {4: _Psnr(32.8, 28.0), 8: _Psnr(36.4, 33.0), 20: _Psnr(38.9, 35.7)},
    ("SD3.5", "fast"): {4: _Psnr(30.1, 23.2), 8: _Psnr(33.4, 28.6), 20: _Psnr(34.3, 28.3)},
    ("Wan2.1-T2V", "balanced"): {
        4: _Psnr(41.5, 39.1),
        8: _Psnr(43.2, 41.0),
        20: _Psnr(45.1, 42.2),
        50: _Psnr(50.5, 47.6),
    },
    ("Wan2.1-T2V", "fast"): {4: _Psnr(39.3, 35.2), 8: _Psnr(40.3, 35.9), 20: _Psnr(38.5, 35.8), 50: _Psnr(45.7, 41.3)},
}
"""PSNR by model, mode and number of steps."""


def expected_psnr(mode: str, total: int | None, is_guided: bool, gathers_kv: bool) -> dict[str, float]:
    """Return the mean PSNR in dB of each measured model in such a run; empty if there is none.

    A run of another length gets the figure of the next shorter one, also if its schedule differs: `fast` over 33 steps,
    with fewer bits than over 20, has 0.3 dB less to 3.8 dB more than that.

    Args:
        mode: one of options.MODES; `auto` has at least the PSNR of `balanced`.
        total: number of steps; None if unknown.
        is_guided: whether the run has several branches of classifier-free guidance.
        gathers_kv: whether K and V are gathered along the slow axes.
    """
    found = {}
    for model in GUIDED if is_guided else UNGUIDED:
        by_steps = MEASURED.get((model, "balanced" if mode == "auto" else mode), {})
        shorter = [steps for steps in by_steps if total is not None and steps <= total]
        if shorter:
            psnr = by_steps[max(shorter)]
            found[model] = psnr.gathered if gathers_kv else psnr.by_heads
    return found


def describe(expected: dict[str, float]) -> str:
    """Return PSNR by model in words."""
    return " and ".join(f"{psnr:.0f} dB with a small {model}" for model, psnr in expected.items())
