"""Small pipelines of Wan with random weights, which are saved for xDiT's runner."""
