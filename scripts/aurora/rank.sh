#!/usr/bin/env bash
# Runs a command as one rank under mpiexec, with the variables that torchrun would set. WORLD_SIZE, MASTER_ADDR and
# MASTER_PORT come from the environment of mpiexec.
set -eu
export RANK="${PALS_RANKID:?run rank.sh under the mpiexec of PALS}" LOCAL_RANK="$PALS_LOCAL_RANKID"
: "${WORLD_SIZE:?}" "${LOCAL_WORLD_SIZE:?}" "${MASTER_ADDR:?}" "${MASTER_PORT:?}"
exec "$@"
