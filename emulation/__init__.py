"""Emulation of a cluster on one machine: a network namespace per rank, with links shaped to a machine's rates.

The demo and tests use it from a clone of the repository; it is not in the wheel.
Input: a topology, the rates of its axes, and the command of every rank.
Output: the command's output by rank and its exit status.
Public: `cluster.main`, `links.from_environment`, `links.Cluster`.
"""
