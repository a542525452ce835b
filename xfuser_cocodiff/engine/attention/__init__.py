"""Ulysses and ring attention over exchanges that overlap with computation.
Input: Q, K and V of a rank's tokens, the mesh of its group, and how a layer is encoded.
Public: `ulysses.ulysses_attention`, `ring_attention.ring_attention`, `reshard.reshard`,
`overlap_schedule.Schedule`, `overlap_schedule.Trial`.
"""
