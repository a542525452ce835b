"""Measurement and demonstration: small models, emulated and simulated clusters, comparisons, benchmarks.

Packages, lowest level first; each imports only those before it:
`launching`, `reporting`, `models`, `emulation`, `probing`, `accelerator`, `simulation`, `full_size`, `comparison`,
`bench`, `one_gpu`, `cluster_bench`, `soak`.
"""
