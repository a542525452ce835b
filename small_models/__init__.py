"""Small models with the names and classes of real ones, to run and test xDiT without downloads or accelerators.

They are in the repository, not in the wheel: `python -m small_models --out DIR` writes them, `cocodiff demo` runs one.
"""
