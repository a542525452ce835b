"""Transformers of full width with a few blocks of each kind and without values, as xDiT runs them.
Input: name of a model, process groups of xDiT, and a device.
Output: a transformer, its blocks by kind, and calls at any resolution and batch size.
Public: `transformer.build`, `transformer.FullSizeTransformer`.
"""
