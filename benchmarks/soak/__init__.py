"""Soak test of xDiT's engine with the plugin: random requests and faults, drawn from a seed.
Input: arguments of the `xdit` command, numbers of ranks, requests and faults.
Output: a record of requests, faults, resources over time and failures.
Public: `campaign.run`, `fault.KINDS`, `report.show`.
"""
