"""Rates that real kernels reach on known accelerators, and the host time of their calls.
Input: published figures, or assumptions that are marked as such.
Output: the duration of a kernel from its FLOPs and bytes.
Public: `accelerators.Accelerator`, `accelerators.ACCELERATORS`.
"""
