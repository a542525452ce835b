"""Measurement and demonstration: emulated and simulated clusters, comparisons.

Packages, lowest level first; each imports only those before it:
`launching`, `reporting`, `emulation`, `probing`, `accelerator`, `simulation`, `comparison`.
"""
