"""How values travel on slow axes: what of them is sent, what both ends hold, and for how long.
In: tensors of a layer by destination, the mode of the settings, and the steps of a run.
Out: `modes.CodecSchedule`, `layer_codecs.LayerCodecs`, `exchange.send`, `gather.start`, `runtime.Runtime`,
`virtual.VirtualRanks`.
"""
