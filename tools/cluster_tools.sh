#!/usr/bin/env bash
# Installs what `make test-cluster`, `nightly-hosts` and `nightly-slurm` need besides Python: SLURM, munge and iproute2, from Debian's packages. No service is
# started; the tests run their own daemons in their own directory.
set -euo pipefail
missing=()
for tool in sbatch:slurm-wlm slurmctld:slurm-wlm slurmd:slurm-wlm munged:munge ip:iproute2 unshare:util-linux; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}")
done
if [ "${#missing[@]}" -eq 0 ]; then
  exit 0
fi
packages=$(printf '%s\n' "${missing[@]}" | sort -u | tr '\n' ' ')
if [ "$(id -u)" -ne 0 ]; then
  echo "make test-cluster needs $packages(and runs as root): apt-get install --no-install-recommends $packages" >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "make test-cluster needs $packages, and there is no apt-get here: install them with this system's package manager" >&2
  exit 1
fi
# Keeps the packages from starting their services.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $packages >/dev/null
