"""A cluster on one machine: a network namespace for each rank, and links shaped to a machine's rates.
Input: a topology, rates of its axes, and the command to run on every rank.
Public: `cluster.main`, `links.from_environment`, `links.Cluster`.
"""
