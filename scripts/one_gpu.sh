#!/usr/bin/env bash
# What one GPU can show, in a folder (argument; default: one-gpu): kernels against a copy of the same bytes and beside a
# layer, the tests that need a device, and ranks that share it: bit for bit against stock, with V's overlap in a trace.
# All parts run, also after one that fails; the status is 1 then.
set -uo pipefail
out=$(realpath -m "${1:-one-gpu}")
. "$(dirname "$0")/environment.sh"

# The first that there is, so that ranks share it.
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" ZE_AFFINITY_MASK="${ZE_AFFINITY_MASK:-0}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES%%,*}" ZE_AFFINITY_MASK="${ZE_AFFINITY_MASK%%,*}"
python -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())' || {
    echo "scripts/one_gpu.sh: PyTorch sees no GPU here; scripts/test.sh has what runs without one" >&2
    exit 2
}
mkdir -p "$out"
failed=()

# Runs a part and keeps what it prints.
part() {
    local name="$1"
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$out/$name.txt" || failed+=("$name")
}

describe() {
    cocodiff env && { nvidia-smi || xpu-smi discovery || echo "no tool tells the driver's version"; }
}

# Ranks that share the device, stock against the plugin.
shared() {
    local folder="$1"
    shift
    cocodiff compare --out "$out/$folder" "$@" --model FLUX.1-dev --seed 1 --prompt "a photo of a cat" \
        --height 512 --width 512 --num_inference_steps 12 --max_sequence_length 32
}

unset HF_HUB_CACHE HUGGINGFACE_HUB_CACHE
# Where but one device is seen, ranks cannot tell that it is for all of them.
export COCODIFF_SHARE_DEVICE=1 HF_HOME="$PWD/.models" HF_HUB_OFFLINE=1
part environment describe
part tests python -m pytest --all tests/engine/kernels/test_kernels.py tests/engine/attention/test_attention.py
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
echo "All of it is in $out"
