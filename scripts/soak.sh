#!/usr/bin/env bash
# Sets up the environment and runs `cocodiff soak` with these arguments, on the CPU.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

use_cpu
exec cocodiff soak "$@"
