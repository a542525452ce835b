#!/usr/bin/env bash
# Runs all tests and measurements that need one GPU, and writes their output to a folder (argument; default: one-gpu): the
# tests of kernels and attention, the speed of the kernels relative to a copy, and comparisons with stock of ranks that
# share the GPU, with traces of the overlap. A part that fails does not stop the others; the exit status is then 1.
#   scripts/one_gpu.sh FOLDER [PART...]    all parts, or those named; parts that have succeeded before are left out
# Each part ends within nine minutes, and adds a line of JSON to parts.jsonl. What is installed is used; if something is
# missing, a virtual environment is made as for the other scripts, which needs a package index.
set -uo pipefail
out=$(realpath -m "${1:-one-gpu}")
only=("${@:2}")
PATH="${VIRTUAL_ENV:+$VIRTUAL_ENV/bin:}$PATH"
if command -v cocodiff > /dev/null && python -c 'import torch, xfuser, pytest' 2> /dev/null; then
    cd "$(dirname "$0")/.." || exit
else
    . "$(dirname "$0")/environment.sh"
fi

# Only the first GPU is visible, so that all ranks share it.
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" ZE_AFFINITY_MASK="${ZE_AFFINITY_MASK:-0}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES%%,*}" ZE_AFFINITY_MASK="${ZE_AFFINITY_MASK%%,*}"
python -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())' || {
    echo "scripts/one_gpu.sh: PyTorch finds no GPU; scripts/test.sh runs the tests that need none" >&2
    exit 2
}
mkdir -p "$out"
failed=()

# Runs a part and writes its output to a file.
part() {
    local name="$1" status=0 started=$SECONDS
    shift
    [ "${#only[@]}" = 0 ] || [[ " ${only[*]} " == *" $name "* ]] || return 0
    if grep -qs "\"part\": \"$name\", \"status\": 0," "$out/parts.jsonl"; then
        echo "== $name: succeeded before"
        return
    fi
    echo "== $name"
    timeout 540 bash -c '"$@"' part "$@" 2>&1 | tee "$out/$name.txt" || status=${PIPESTATUS[0]}
    printf '{"part": "%s", "status": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - started)) >> "$out/parts.jsonl"
    [ "$status" = 0 ] || failed+=("$name")
}

describe() {
    cocodiff env && { nvidia-smi || xpu-smi discovery || echo "driver version unknown: neither nvidia-smi nor xpu-smi found"; }
}

# Compares the plugin with stock on ranks that share the GPU.
shared() {
    local folder="$1"
    shift
    cocodiff compare --out "$out/$folder" "$@" --model FLUX.1-dev --seed 1 --prompt "a photo of a cat" \
        --height 512 --width 512 --num_inference_steps 12 --max_sequence_length 32
}

export out
export -f describe shared
unset HF_HUB_CACHE HUGGINGFACE_HUB_CACHE
# With one visible device, ranks cannot detect that they share it.
export COCODIFF_SHARE_DEVICE=1 HF_HOME="$PWD/.models" HF_HUB_OFFLINE=1
part environment describe
part tests python -m pytest --all tests/engine/kernels tests/engine/attention/test_attention.py
part kernels cocodiff bench kernels --degree 8 --json "$out/kernels.json"
part models cocodiff models --out .models
part degree-2 shared degree-2 --trace -- --ulysses_degree 2 --cocodiff_topology node=2 \
    --cocodiff_mode exact --cocodiff_v_first on
part degree-4 shared degree-4 --trace -- --ulysses_degree 4 --cocodiff_topology node=2,gpu=2 \
    --cocodiff_mode exact --cocodiff_v_first on --cocodiff_a2a hierarchical
part coded shared coded -- --ulysses_degree 4 --cocodiff_topology node=2,gpu=2 --cocodiff_mode balanced \
    --cocodiff_slow_axes node

if [ "${#failed[@]}" -gt 0 ]; then
    echo "Failed: ${failed[*]}" >&2
    exit 1
fi
echo "All output is in $out"
