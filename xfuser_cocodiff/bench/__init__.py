"""Measuring the plugin against stock xDiT, and telling what came of it."""
