"""Runs an emulated cluster: `python emulation ...` from any folder, or `python -m emulation ...`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from emulation import cluster

sys.exit(cluster.main())
