"""Topology-aware, compressed sequence-parallel attention. Imports no xfuser and would serve any host.

Packages, lowest level first; each imports only those before it:
`topology`, `kernels`, `comm`, `compression`, `attention`, `settings`, `autotune`.
"""
