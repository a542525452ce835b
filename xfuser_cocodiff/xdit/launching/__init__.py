"""xDiT as our own commands run it: its command line, its groups without a pipeline, its pipeline on one rank.
In: arguments of xDiT, and engines to run it by.
Out: `command.launch`, `world.start`, `solo.Solo`.
"""
