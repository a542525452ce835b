#!/usr/bin/env bash
# Sets up the environment, lints, and runs the quick tests, on the CPU also where there is a GPU. --all runs the slow ones
# too. All arguments go to pytest; of several processes (-n) one is started for each core, up to four.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

use_cpu
ruff check .
ruff format --check .
mypy
cores=$(nproc)
python -m pytest -n $((cores < 4 ? cores : 4)) --dist loadscope "$@"
