"""Attention layers of any transformer: their calls, and V projected and sent before Q and K.
Input: the modules that run, and the V that reaches xDiT's USP.
Output: signatures of layer calls, and a handle of V's all-to-all.
Public: `layers.Layers`, `root_module.RootModule`, `layer_signature.LayerSignature`,
`schedule_candidates.ScheduleCandidates`, `model_projections.PROJECTIONS`.
"""
