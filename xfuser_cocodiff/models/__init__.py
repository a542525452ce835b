"""Small models under the real names: enough to run, test and time xDiT without a download or an accelerator.
In: nothing but the weights beside it, and seeds.
Out: `hub.write_cache`, `flux1.pipeline`, `slices.draw`.
"""
