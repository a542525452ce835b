"""Small models under the real names: enough to run, test and time xDiT without a download or an accelerator.
Input: nothing but the weights beside it, and seeds.
Public: `hub.write_cache`, `flux1.pipeline`, `slices.draw`.
"""
