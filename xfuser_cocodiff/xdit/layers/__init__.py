"""Attention layers of any transformer as they are called, and where their V comes from.
In: modules that run, and the V that reached USP.
Out: `layers.Layers`, `root.Root`, `kind.Kind`, `v_source.TABLE`.
"""
