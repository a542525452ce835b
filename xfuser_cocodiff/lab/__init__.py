"""Measurement and demonstration: small models, emulated and simulated clusters, comparisons, benchmarks.

Packages, lowest level first; each imports only those before it:
`reporting`, `models`, `emulation`, `probing`, `accelerator`, `simulation`, `full_size`, `comparison`, `tuning`,
`bench`, `one_gpu`.
"""
