"""Launching of xDiT for the plugin's own commands: command lines, process groups, and a pipeline on one rank.
Input: arguments of xDiT, and configs or sessions to run it with.
Output: command lines, process groups, pipelines, their traffic as stock, and what their sessions decided.
Public: `command_line.launch_command`, `bare_runtime.start`, `single_rank.SingleRankPipeline`.
"""
