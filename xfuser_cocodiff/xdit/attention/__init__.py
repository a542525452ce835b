"""The sites of xDiT where Q, K, V and O travel, and outputs come together, over the plugin's exchanges.
Input: what xDiT's USP and its exchanges are given.
Public: `usp.patches`, `patch_points.patches`, `output_gather.patches`, `long_context.patches`,
`ring_attention.patches`.
"""
