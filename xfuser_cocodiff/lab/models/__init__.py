"""Small models with the names and classes of real ones, to run and test xDiT without downloads or accelerators.
Input: names of models, weights that are part of the package, and seeds.
Output: diffusers pipelines, a Hugging Face cache with them, and the table of supported model families.
Public: `hub.write_cache`, `flux1.pipeline`, `slices.draw`.
"""
