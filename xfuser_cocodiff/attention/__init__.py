"""Ulysses and ring attention over exchanges that overlap with computation.
In: Q, K and V of a rank's tokens, the mesh of its group, and how a layer is encoded.
Out: `ulysses.ulysses_attention`, `ring.ring_attention`, `reshard.reshard`, `schedule.Schedule`, `schedule.Trial`.
"""
