"""The plugin in one engine of xDiT: its groups, runs and trials, from its start to its end.
Input: the settings in xDiT's parallel config, and calls of transformers.
Public: `session.Session`, `session.active`, `startup.patches`.
"""
