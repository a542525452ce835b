"""How a site of a host is found without importing it, replaced when it is imported, and given back.
Input: rows, each with a symbol, its replacement and the reason.
Public: `patch.Patch`, `patch.PatchSet`, `symbol_lookup.find_symbol`, `log.warn_once`.
"""
