#!/usr/bin/env bash
# Sets up the environment, lints, checks types and runs the quick tests, always on the CPU. --all runs the slow tests too.
# Arguments are passed to pytest, which runs one process per core, at most four (-n).
set -euo pipefail
. "$(dirname "$0")/environment.sh"

use_cpu
ruff check .
ruff format --check .
mypy
cores=$(nproc)
python -m pytest -n $((cores < 4 ? cores : 4)) --dist loadscope "$@"
