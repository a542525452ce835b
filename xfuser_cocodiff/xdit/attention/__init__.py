"""The sites of xDiT where Q, K, V and O travel, and outputs come together, over the plugin's exchanges.
In: what xDiT's USP and its exchanges are given.
Out: `usp.patches`, `sites.patches`, `outputs.patches`, `long_context.patches`, `ring_attention.patches`.
"""
