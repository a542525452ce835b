"""Emulation of a cluster on one machine: a network namespace per rank, with links shaped to a machine's rates.
Input: a topology, the rates of its axes or a link profile and a dilation, and the command or function of every rank.
Output: the command's output by rank and its exit status, or what the function returned.
Public: `cluster.main`, `links.from_environment`, `links.Cluster`, `forked_ranks.run_forked`,
`forked_ranks.prepare_environment`, `forked_ranks.RankFailedError`, `dilation.slow_cluster`, `dilation.change_dilation`,
`counters.payload_bytes`, `core_times.CoreTimes`.
"""
