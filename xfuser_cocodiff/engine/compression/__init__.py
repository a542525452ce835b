"""Compression on slow axes: modes, runs and their steps, and coded collectives.
Input: a layer's tensors by destination, a mode with its schedule, and the steps of a run.
Output: tensors as their receivers decode them, and a report of bytes and errors for each step.
Public: `modes.CodecSchedule`, `layer_codecs.LayerCodecs`, `coded_all_to_all.start`, `coded_all_gather.gather`,
`coded_all_gather.gather_blocks`, `runtime.CodecRuntime`.
"""
