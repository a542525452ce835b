"""Ulysses and ring attention whose communication overlaps with computation.
Input: Q, K and V of a rank's tokens, the mesh of its group, and the codecs of the layer.
Output: the attention output of the same tokens.
Public: `ulysses.UlyssesAttention`, `ring_attention.ring_attention`, `reshard.reshard`,
`overlap_schedule.OverlapSchedule`.
"""
