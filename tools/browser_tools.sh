#!/usr/bin/env bash
# Installs Chromium, with which a test loads the page of `megarl report`, and Node.js, with which one loads a trace of
# `megarl trace` in Perfetto's engine, from Debian's packages. Without them these tests are skipped; they fail with
# MEGARL_NEEDS_CHROMIUM=1 and MEGARL_NEEDS_NODE=1.
set -euo pipefail

# True if one of the programs is there.
has() {
  local name
  for name in "$@"; do
    command -v "$name" >/dev/null && return 0
  done
  return 1
}

missing=()
has chromium chromium-browser google-chrome || missing+=(chromium)
has node || missing+=(nodejs)
if [ "${#missing[@]}" -eq 0 ]; then
  exit 0
fi
needs="the tests of megarl report need chromium, and one of megarl trace nodejs"
if [ "$(id -u)" -ne 0 ]; then
  echo "$needs: as root, apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "$needs, and there is no apt-get here: install ${missing[*]} with this system's package manager" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
