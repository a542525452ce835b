"""Describes the accelerators of known machines, for everything that predicts or emulates their time.
Input: published measurements, or assumptions that are marked as such.
Output: rates of one rank's device, and the duration of a kernel on it.
Public: `accelerators.Accelerator`, `accelerators.ACCELERATORS`.
"""
