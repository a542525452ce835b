"""Support for devices that xDiT does not know: Intel's XPU, and a device that several ranks share.
Input: the devices that PyTorch and the launcher report.
Output: the platform of this machine, and the patches with which xDiT runs on it.
Public: `platform.detect`, `platform.patches`, `platform.compute_device`.
"""
