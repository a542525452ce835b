"""Measurement and demonstration: small models, emulated and simulated clusters, comparisons.

Packages, lowest level first; each imports only those before it:
`launching`, `reporting`, `models`, `emulation`, `probing`, `accelerator`, `simulation`, `comparison`.
"""
