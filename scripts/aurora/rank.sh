#!/usr/bin/env bash
# One rank under mpiexec: runs a command with the variables that torchrun would have given it. The number of all ranks and
# where they meet are in the environment of mpiexec, which hands it on.
set -eu
export RANK="${PALS_RANKID:?rank.sh runs under the mpiexec of PALS}" LOCAL_RANK="$PALS_LOCAL_RANKID"
: "${WORLD_SIZE:?}" "${LOCAL_WORLD_SIZE:?}" "${MASTER_ADDR:?}" "${MASTER_PORT:?}"
exec "$@"
