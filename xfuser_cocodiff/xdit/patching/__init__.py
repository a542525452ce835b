"""Patches of a host package: symbols that are replaced when their module is imported, and restored.
Input: patches, each with a symbol, its replacement and the reason.
Output: the patched host, and messages to the user.
Public: `patch.Patch`, `patch.PatchSet`, `host.runtime_state`, `symbol_lookup.find_symbol`, `log.warn_once`.
"""
