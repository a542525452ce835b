"""Predicted steps on machines that are known on paper: how long they take, what they send, and how to split a degree.
In: figures of machines and models, or a measured profile.
Out: `simulate.sweep`, `plan_model.record`, `forecast.forecast`.
"""
