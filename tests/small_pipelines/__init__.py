"""Small pipelines with random weights: those of :mod:`loops`, and Wan's, which are saved for xDiT's runner."""
