"""Compares stock xDiT with the plugin: step time, communication and image quality.
Input: the xDiT command of a user, or the modes and seeds of a quality measurement.
Output: a record, an HTML report, and tables for the console.
Public: `compare.compare`, `recorder.Recorder`, `report.write`, `quality.measure`.
"""
