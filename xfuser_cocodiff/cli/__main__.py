"""Runs the `cocodiff` command as `python -m xfuser_cocodiff.cli`."""

import sys

from xfuser_cocodiff.cli import main

sys.exit(main())
