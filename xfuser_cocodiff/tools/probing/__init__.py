"""`cocodiff probe`: point-to-point measurements of all pairs of ranks, and the topology inferred from them.
Input: a process group.
Output: a record with a link profile that `--cocodiff_profile` reads.
Public: `link_survey.measure`, `link_survey.measure_profile`, `pairwise_links.measure_pairs`,
`topology_inference.infer_topology`.
"""
