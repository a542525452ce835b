"""Stock xDiT against the plugin: launched alike, recorded, compared and told.
In: a command of the user, or seeds and modes.
Out: `compare.compare`, `recorder.Recorder`, `report.write`, `quality.measure`.
"""
