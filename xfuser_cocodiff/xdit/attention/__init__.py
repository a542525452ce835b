"""Patches of xDiT's attention: its all-to-alls, USP and long-context attention.
Input: Q, K and V as xDiT's functions take them.
Output: the results of these functions, computed over the plugin's collectives.
Public: `usp.patches`, `all_to_all.patches`, `long_context.patches`, `indivisible_heads.patches`.
"""
