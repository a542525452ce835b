"""Bits allotted to the layers of a user's own model, by what an error in each of them does to its pictures.
Input: a model, prompts, and a target of bytes or of fidelity.
Public: `tune.Tuner`, `report.show`.
"""
