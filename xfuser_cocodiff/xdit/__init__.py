"""The integration into xDiT: entry points, patches, attention hooks and run tracking.

Packages, lowest level first; each imports only those before it:
`settings`, `patching`, `platforms`, `layers`, `session`, `attention`, `run_tracking`, `integration`.
"""
