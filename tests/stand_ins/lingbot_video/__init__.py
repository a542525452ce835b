"""What xDiT's wrapper needs of robbyant/lingbot-video, which is in no package index: a model of the same make."""
