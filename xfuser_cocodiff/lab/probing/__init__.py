"""`cocodiff probe`: the links between every two ranks, and the topology that they suggest.
Input: a group of ranks.
Public: `link_survey.measure`, `pairwise_links.measure_pairs`, `topology_inference.infer_topology`.
"""
