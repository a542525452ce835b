"""Attention layers of any transformer as they are called, and where their V comes from.
Input: modules that run, and the V that reached USP.
Public: `layers.Layers`, `root_module.RootModule`, `layer_signature.LayerSignature`, `v_source.TABLE`.
"""
