"""Measurement: comparisons, probes and predictions for users' own models and machines.

Packages, lowest level first; each imports only those before it:
`launching`, `reporting`, `probing`, `accelerator`, `simulation`, `comparison`.
"""
