"""PSNR that runs of a mode may expect: that of the small trained models, for as many steps, with and without guidance.

Other models have other errors: the figures say what to look for, and `cocodiff quality --model` measures it.
"""

from typing import NamedTuple


class _Psnr(NamedTuple):
    """Mean PSNR to lossless runs in dB, bf16, 2x2 virtual ranks; see docs/quality.md."""

    gathered: float
    """With K and V gathered along the slow axes."""
    by_heads: float
    """With Q, K, V and O in all-to-alls by heads."""


_JUDGED: dict[tuple[str, bool], dict[int, _Psnr]] = {
    ("balanced", False): {4: _Psnr(53.3, 48.7), 8: _Psnr(55.6, 51.8), 20: _Psnr(55.2, 50.2), 50: _Psnr(55.2, 53.6)},
    ("fast", False): {4: _Psnr(48.3, 41.2), 8: _Psnr(52.1, 46.3), 20: _Psnr(49.3, 42.6), 50: _Psnr(53.0, 47.9)},
    ("balanced", True): {4: _Psnr(36.1, 30.1), 8: _Psnr(39.4, 33.9), 20: _Psnr(42.6, 38.1), 50: _Psnr(47.7, 44.4)},
    ("fast", True): {4: _Psnr(28.9, 23.8), 8: _Psnr(32.9, 27.4), 20: _Psnr(33.8, 28.1), 50: _Psnr(41.7, 36.0)},
}
"""PSNR by mode, guidance and number of steps: FLUX.1-dev without guidance, and Wan2.1-T2V with a scale of 5."""
MODELS = {False: "FLUX.1-dev", True: "Wan2.1-T2V"}
"""Small trained model that was judged, without and with guidance."""


def expected_psnr(mode: str, total: int | None, is_guided: bool, gathers_kv: bool) -> float | None:
    """Return the mean PSNR in dB that a small trained model has in such a run; None where none was judged.

    Runs of other lengths have that of the next shorter one, since fewer steps have a lower PSNR.

    Args:
        mode: one of options.MODES; `auto` has at least the PSNR of `balanced`.
        total: number of steps; None if unknown.
        is_guided: whether the run has several branches of classifier-free guidance.
        gathers_kv: whether K and V are gathered along the slow axes.
    """
    judged = _JUDGED.get(("balanced" if mode == "auto" else mode, is_guided), {})
    shorter = [steps for steps in judged if total is not None and steps <= total]
    if not shorter:
        return None
    psnr = judged[max(shorter)]
    return psnr.gathered if gathers_kv else psnr.by_heads
