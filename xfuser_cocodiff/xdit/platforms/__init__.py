"""Devices that xDiT does not know: the CPU, Intel's XPU, and one that several ranks share.
Input: what PyTorch and the launcher say of this machine.
Public: `platform.detect`, `platform.patches`, `platform.compute_device`.
"""
