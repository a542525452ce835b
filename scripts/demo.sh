#!/usr/bin/env bash
# Sets up the environment and compares stock xDiT with CoCoDiff: FLUX.1-dev on 4 ranks, first on equal links, then with slow
# links between two emulated nodes. Prints a table for each part, and writes reports with images: that of part 2 to
# cocodiff-report, that of part 1 to cocodiff-report/equal-links.
# Arguments replace those of xdit, for example: scripts/demo.sh --model Qwen-Image --ulysses_degree 2 --prompt "a cat"
set -euo pipefail
. "$(dirname "$0")/environment.sh"
[ $# -eq 0 ] || set -- -- "$@"
exec cocodiff demo "$@"
