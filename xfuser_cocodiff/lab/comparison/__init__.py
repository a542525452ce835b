"""Stock xDiT against the plugin: launched alike, recorded, compared and told.
Input: a command of the user, or seeds and modes.
Public: `compare.compare`, `recorder.Recorder`, `report.write`, `quality.measure`.
"""
