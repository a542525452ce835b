"""The plugin in one engine of xDiT: its groups, runs and trials, from its start to its end.
In: the settings in xDiT's parallel config, and calls of transformers.
Out: `engine.Engine`, `engine.active`, `start.patches`.
"""
