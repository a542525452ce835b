"""Emulates the accelerator of a rank: what PyTorch code would do on the device, when, and how long its messages take.
Input: the speed of a known device, and code that runs on it.
Output: recorded steps, and their predicted times on the links of a machine.
Public: `device.EmulatedAccelerator`, `prediction.predict`.
"""
