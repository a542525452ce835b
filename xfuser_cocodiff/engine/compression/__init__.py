"""How values travel on slow axes: what of them is sent, what both ends hold, and for how long.
Input: tensors of a layer by destination, the mode of the settings, and the steps of a run.
Public: `modes.CodecSchedule`, `layer_codecs.LayerCodecs`, `coded_all_to_all.start`, `coded_all_gather.start`,
`runtime.CodecRuntime`,
`virtual_ranks.VirtualRanks`.
"""
