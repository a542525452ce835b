#!/usr/bin/env bash
# The main job: stock xDiT against CoCoDiff, FLUX.1-dev at Ulysses degree 4 on a machine of 2 nodes with 2 GPUs.
# Arguments replace those of xdit, for example: scripts/demo.sh --model Qwen-Image --ulysses_degree 2 --prompt "a cat"
set -euo pipefail
. "$(dirname "$0")/environment.sh"

if [ $# -eq 0 ]; then
    set -- --model FLUX.1-dev --prompt "a photo of a cat" --height 128 --width 128 --num_inference_steps 28 \
        --max_sequence_length 32 --seed 1 --ulysses_degree 4 --cocodiff_topology 2x2
    # Fewer devices than ranks are of no use here; the CPU holds any number of ranks.
    [ "$(python -c 'import torch; print(torch.accelerator.device_count())')" -ge 4 ] || use_cpu
fi

cocodiff models --out .models
unset HF_HUB_CACHE HUGGINGFACE_HUB_CACHE
export HF_HOME="$PWD/.models" HF_HUB_OFFLINE=1
rm -f cocodiff-report/report.html
status=0
cocodiff compare --out cocodiff-report -- "$@" || status=$?
[ ! -f cocodiff-report/report.html ] || echo "The report is at $PWD/cocodiff-report/report.html"
exit "$status"
