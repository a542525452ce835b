"""`cocodiff probe`: the links between every two ranks, and the topology that they suggest.
In: a group of ranks.
Out: `survey.measure`, `pairs.measure_pairs`, `inference.infer_topology`.
"""
