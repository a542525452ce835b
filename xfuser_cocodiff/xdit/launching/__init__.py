"""xDiT as our own commands run it: its command line, its groups without a pipeline, its pipeline on one rank.
Input: arguments of xDiT, and engines to run it by.
Public: `command_line.launch_command`, `bare_runtime.start`, `single_rank.SingleRankPipeline`.
"""
