"""How a site of a host is found without importing it, replaced when it is imported, and given back.
In: rows, each with a symbol, its replacement and the reason.
Out: `patch.Patch`, `patch.PatchSet`, `source.found`, `log.warn`.
"""
