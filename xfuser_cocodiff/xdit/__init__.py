"""All that knows xDiT, in rooms; each room imports only those named before it.
In: xDiT's functions, arguments, groups and runs, as patches get hold of them.
Out: `door.activation`, for the package's own doors; `launching`, for commands that run xDiT themselves.

Rooms: `patching`, `platform`, `layers`, `engine`, `attention`, `clock`, `door`, `launching`.
"""
