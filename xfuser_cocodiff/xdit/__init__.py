"""The integration into xDiT: entry points, patches, attention hooks and run tracking. Only this floor imports xfuser.

Packages, lowest level first; each imports only those before it:
`settings`, `patching`, `platforms`, `layers`, `session`, `attention`, `run_tracking`, `integration`, `launching`.
"""
