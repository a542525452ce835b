"""Machines on paper: how long steps take there, what they send, and how to split a degree.
In: figures of machines and models, or a measured profile.
Out: `simulate.simulate`, `sizing.record`, `paper.validate`, `forecast.forecast`.
"""
