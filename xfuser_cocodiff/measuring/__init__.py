"""What the links of a machine are and which plan is fastest on them, found by trying.
In: a group of ranks, the settings, and what an earlier process has found.
Out: `planned.planned_mesh`, `probe.Probe`, `findings.Findings`, `stopwatch.contest`.
"""
