"""Launching of xDiT for the plugin's own commands: command lines, process groups, and a pipeline on one rank.
Input: arguments of xDiT, and configs or sessions to run it with.
Output: command lines, process groups and pipelines.
Public: `command_line.launch_command`, `bare_runtime.start`, `single_rank.SingleRankPipeline`.
"""
