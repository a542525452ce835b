"""`cocodiff bench`: measurements of the all-to-all, of denoising steps, and of the codecs' kernels.
Input: ranks under torchrun or on an emulated cluster, or one device.
Output: records and their tables.
Public: `a2a.measure`, `model.measure`, `kernels.measure`.
"""
