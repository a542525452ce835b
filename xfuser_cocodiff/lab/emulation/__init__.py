"""Emulation of a cluster on one machine: a network namespace per rank, with links shaped to a machine's rates.
Input: a topology, the rates of its axes, and the command or function of every rank.
Output: the command's output by rank and its exit status, or what the function returned.
Public: `cluster.main`, `links.from_environment`, `links.Cluster`, `forked_ranks.run_forked`,
`forked_ranks.prepare_environment`, `forked_ranks.RankFailedError`, `counters.payload_bytes`.
"""
