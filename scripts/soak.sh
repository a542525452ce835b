#!/usr/bin/env bash
# Sets up the environment and runs the soak test with these arguments, on the CPU.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

use_cpu
exec python -m benchmarks.soak "$@"
