"""Tunes the bits per value of a user's own model: more for the layers in which errors lower the image quality most.
Input: a model, prompts, and a target: a fraction of the lossless bytes, or a PSNR.
Output: a schedule file for `--cocodiff_schedule`, with evidence from prompts and seeds that were held out.
Public: `tune.Tuner`, `report.show`.
"""
