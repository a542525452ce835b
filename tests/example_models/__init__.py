"""Small pipelines, with random weights, for xDiT's example scripts: of models that its runner has no name for."""
