"""State of the plugin for one xDiT engine: runs, codecs and autotuning, from its start to its end.
Input: the options in xDiT's parallel config, and calls of transformers.
Output: a session in xDiT's runtime state, which tells attention how to communicate.
Public: `session.Session`, `session.active`, `startup.create_session`, `startup.patches`.
"""
