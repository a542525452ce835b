"""Emulates the accelerator of a rank: what PyTorch code would do on the device, when, and how long its messages take.
Input: the speed of a known device (published, or an assumption that is marked as such), and code that runs on it.
Output: recorded steps, and their times on the shaped links of an emulated cluster at any dilation.
Public: `accelerators.Accelerator`, `accelerators.ACCELERATORS`, `device.EmulatedAccelerator`, `transport.Transport`.
"""
