# shellcheck shell=bash
# Sourced by the other scripts: changes to the checkout and installs the project with its extras, if needed.
#
# Uses the active virtual environment if VIRTUAL_ENV is set, else .venv, which it creates. An installed PyTorch is kept.
#   COCODIFF_PYTHON=python3.12       interpreter for a new .venv
#   COCODIFF_SYSTEM_TORCH=1          give a new .venv the packages of that interpreter, such as PyTorch
#   COCODIFF_TORCH=torch==2.10.0     requirement to install if there is no PyTorch
#   COCODIFF_TORCH_INDEX=URL         package index for it, such as that of the CPU builds

unset CDPATH
export PYTHONDONTWRITEBYTECODE=""  # else each of the many processes that tests start compiles all modules again
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -e .venv/bin/activate ]; then
        "${COCODIFF_PYTHON:-python3}" -m venv ${COCODIFF_SYSTEM_TORCH:+--system-site-packages} .venv || {
            rm -rf .venv
            echo "Cannot create a virtual environment; on Debian and Ubuntu, install the package python3-venv." >&2
            exit 1
        }
    fi
    # shellcheck source=/dev/null
    . .venv/bin/activate
fi
PATH="$VIRTUAL_ENV/bin:$PATH"
python -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "Python 3.10 or later is required, not $(python --version); set COCODIFF_PYTHON to another interpreter." >&2
    exit 1
}

# Reinstalling takes seconds even if nothing has changed, so it is done once per version of setup.py.
required="$PWD $(cksum < setup.py)"
stamp="$VIRTUAL_ENV/.cocodiff-installed"
if [ "$(cat "$stamp" 2> /dev/null)" != "$required" ]; then
    python -m pip --version > /dev/null 2>&1 || python -m ensurepip > /dev/null
    python -c 'import torch' 2> /dev/null ||
        python -m pip install --quiet ${COCODIFF_TORCH_INDEX:+--index-url "$COCODIFF_TORCH_INDEX"} "${COCODIFF_TORCH:-torch==2.13.0}"
    extras="test"
    python -c 'import triton' 2> /dev/null || extras=test,cpu
    python -m pip install --quiet --editable ".[$extras]"
    echo "$required" > "$stamp"
fi

# Hides all accelerators from PyTorch, so that any number of ranks can run.
use_cpu() {
    export CUDA_VISIBLE_DEVICES="" HIP_VISIBLE_DEVICES="" ONEAPI_DEVICE_SELECTOR="opencl:cpu"
}
