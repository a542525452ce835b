#!/usr/bin/env bash
# Builds the site of the documentation into site/, with warnings as errors: links, anchors and the navigation are checked.
# Installs the extra "docs" alone into .venv-docs, without PyTorch. Arguments replace `build`: scripts/docs.sh serve
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${COCODIFF_PYTHON:-python3}"
[ -e .venv-docs/bin/python ] || "$python" -m venv .venv-docs
# The list of setup.py, without what the package itself needs.
read -ra wanted <<< "$("$python" -c '
import ast
tree = ast.parse(open("setup.py").read())
print(*next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "DOCS"))
')"
stamp=.venv-docs/.installed
if [ "$(cat "$stamp" 2> /dev/null)" != "${wanted[*]}" ]; then
    .venv-docs/bin/python -m pip install --quiet "${wanted[@]}"
    echo "${wanted[*]}" > "$stamp"
fi
# Not of the site: a notice of the theme's makers.
export NO_MKDOCS_2_WARNING=1
if [ $# -eq 0 ]; then
    set -- build --clean
fi
exec .venv-docs/bin/mkdocs "$@" --strict
