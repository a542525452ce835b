"""Predicted steps on machines that are known on paper: how long they take, what they send, and how to split a degree.
Input: figures of machines and models, or a measured profile.
Public: `simulate.sweep`, `plan_model.record`, `forecast.forecast`.
"""
