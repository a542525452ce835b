"""Colours of charts, readable on white and on black."""

INK = "#7d7d7d"
"""Of text and lines: readable on white and on black, since one chart serves both."""
REST_COLOUR = "#b8bec6"
EXPOSED_COLOUR, HIDDEN_COLOUR = "#c8553d", "#b8bec6"
AXIS_COLOURS = {"flat": "#8f6f9f", "node": "#c8553d", "gpu": "#e0a458", "tile": "#4f8a8b"}
