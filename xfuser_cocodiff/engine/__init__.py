"""Topology-aware, compressed sequence-parallel attention, independent of the host: it imports no xfuser.

Packages, lowest level first; each imports only those before it:
`topology`, `codec`, `comm`, `compression`, `attention`, `autotune`.
"""
