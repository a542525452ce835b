"""Predicts step time, traffic and memory of full-size models on clusters, and compares splits of a degree.
Input: figures of clusters and models, or a measured link profile.
Output: the records of `cocodiff plan` and `cocodiff simulate`, and their tables.
Public: `simulate.sweep`, `plan_model.record`, `forecast.forecast`.
"""
