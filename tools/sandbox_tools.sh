#!/usr/bin/env bash
# Installs what the sandbox needs beside Python (the Python tool, the reward function `code`, and their tests):
# bubblewrap, and util-linux for prlimit and setpriv, from Debian's packages.
set -euo pipefail
missing=()
for tool in bwrap:bubblewrap prlimit:util-linux setpriv:util-linux; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}")
done
if [ "${#missing[@]}" -eq 0 ]; then
  exit 0
fi
packages=$(printf '%s\n' "${missing[@]}" | sort -u | tr '\n' ' ')
if [ "$(id -u)" -ne 0 ]; then
  echo "the sandbox needs $packages: as root, apt-get install --no-install-recommends $packages" >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "the sandbox needs $packages, and there is no apt-get here: install them with this system's package manager" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $packages >/dev/null
