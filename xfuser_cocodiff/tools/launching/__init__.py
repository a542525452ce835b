"""Launching of xDiT for the plugin's own commands: command lines, process groups, and a pipeline on one rank.
Input: arguments of xDiT, and configs to run it with.
Output: command lines, process groups, pipelines, and their traffic as stock.
Public: `command_line.launch_command`, `rank_group.start`, `single_rank.SingleRankPipeline`.
"""
