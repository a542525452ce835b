"""Measurements of parts of the plugin: the all-to-all, steps of a model, and kernels.
Input: ranks under torchrun or on an emulated cluster, or one device.
Public: `a2a.measure`, `model.measure`, `kernels.measure`, `suite.make`.
"""
