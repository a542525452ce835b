#!/usr/bin/env bash
# Runs a command on every rank of an emulated cluster: network namespaces on this machine, connected by shaped links.
#   scripts/emulated_cluster.sh --preset aurora -- python program.py
#   scripts/emulated_cluster.sh --topology node=2,gpu=2,tile=2 --rates tile=148,gpu=12,node=13.3 -- cocodiff probe
# Requires iproute2, and root or user namespaces. --help shows the options.
set -euo pipefail
caller="$PWD"
. "$(dirname "$0")/environment.sh"
checkout="$PWD"
cd "$caller"
exec python "$checkout/emulation" "$@"
