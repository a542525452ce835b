"""Predicts step time, traffic and memory of full-size models on machines, by mode and by split of a degree.
Input: figures of machines and models, or a measured link profile.
Output: the record of `cocodiff plan`, and its table.
Public: `plan.record`, `step_time.rank_splits`.
"""
