"""What the links of a machine are and which plan is fastest on them, found by trying.
Input: a group of ranks, the settings, and what an earlier process has found.
Public: `plan_selection.planned_mesh`, `link_probe.Probe`, `tuning_cache.TuningCache`,
`interleaved_timing.contest`.
"""
