"""Devices that xDiT does not know: the CPU, Intel's XPU, and one that several ranks share.
In: what PyTorch and the launcher say of this machine.
Out: `platform.detect`, `platform.patches`, `platform.compute_device`.
"""
