#!/usr/bin/env bash
# Sets up the environment, lints, checks types and runs the quick tests, always on the CPU. --all runs the slow tests too.
# Arguments are passed to pytest, which runs one process per core, at most four (-n).
set -euo pipefail
. "$(dirname "$0")/environment.sh"

use_cpu
export CI=1  # PyTorch then rejects custom operators whose outputs share storage
ruff check .
ruff format --check .
mypy
cores=$(nproc)
python -m pytest -n $((cores < 4 ? cores : 4)) --dist worksteal "$@"
