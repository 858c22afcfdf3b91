#!/usr/bin/env bash
# Installs the published implementations that tests compare with, into a directory of their own:
#   tools/oracles.sh DIRECTORY [PYTHON]
# The tests find it by the environment variable MEGARL_ORACLES (make test-oracles does both). Without dependencies, since
# what the compared functions need is in the test environment already, and nothing of it may be replaced.
set -euo pipefail
directory=${1:?usage: tools/oracles.sh DIRECTORY [PYTHON]}
python=${2:-python3}
lock="$(cd "$(dirname "$0")/.." && pwd)/requirements/oracles.lock"
if cmp -s "$lock" "$directory/.installed"; then
  exit 0
fi
"$python" -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target "$directory" -r "$lock"
cp "$lock" "$directory/.installed"
