#!/usr/bin/env bash
# Sets up the environment, lints, and runs all tests, on the CPU also where there is a GPU. Arguments go to pytest.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

use_cpu
ruff check .
ruff format --check .
python -m pytest "$@"
