"""Small pipelines with random weights: of :mod:`loops`, and of Wan's, which are written to where xDiT's runner finds
them."""
