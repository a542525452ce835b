"""Provides the captions that the small models were trained with, and the corpora of their tokenizers."""

SLICES = {
    "bodies": "cell bodies",
    "cells": "cells with membranes",
    "vessels": "blood vessels",
    "texture": "fibre texture",
}
VOLUMES = {"heart": "a beating heart", **SLICES}
# Sample images of scikit-image, all free to use, with their captions.
PHOTOS = {
    "chelsea.png": "a cat",
    "astronaut.png": "an astronaut",
    "coffee.png": "a cup of coffee",
    "camera.png": "a man with a camera",
}
SLICE_TEMPLATES = ("a micro-tomography slice of {}", "an x-ray slice of {}", "a slice of {}", "{}")
PHOTO_TEMPLATES = ("a photo of {}", "a picture of {}", "{}")
VIDEO_TEMPLATES = ("a micro-tomography flight through {}", "a flight through {}", "a video of {}", "{}")

CORPUS = [
    *(template.format(name) for template in SLICE_TEMPLATES for name in SLICES.values()),
    *(template.format(name) for template in PHOTO_TEMPLATES for name in PHOTOS.values()),
    "describe the image by detailing the color shape size texture quantity text spatial relationships of the objects",
    "and background user assistant system you are an ai that reasons about image descriptions",
    "give structured responses focusing on object relationships attribution and actions without speculation",
    "old coins a rocket a brick wall galaxies in deep space the surface of the moon the retina of an eye",
    "a small dog in the park at night with mountains trees water and a red house under the sun high quality detailed",
]
VIDEO_CORPUS = [template.format(name) for template in VIDEO_TEMPLATES for name in VOLUMES.values()]
