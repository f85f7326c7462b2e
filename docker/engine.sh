#!/bin/bash
# A Docker engine where none is installed and no image registry can be reached: for trying out the image and for `make docker-test`.
# Debian, root.  With an engine and a registry nothing of this is needed.
#
#   docker/engine.sh up       installs and starts an engine; without a python:3.11-slim, makes a stand-in from Debian's archive
#   docker/engine.sh wheels   fills docker/wheels with what the image needs, for --build-arg PIP_NO_INDEX=1
#   docker/engine.sh down     stops the engine that `up` started
#
# STATE (default ~/.cache/plnode-engine) keeps images, containers and the log; SUITE (default bookworm, whose Python is 3.11) names
# the Debian release, MIRROR its archive.  The stand-in checks the Dockerfile, not the true base image, and trusts the certificates
# that this machine trusts: never publish it or what is built on it.
set -euo pipefail
cd "$(dirname "$0")/.."
STATE=${STATE:-${XDG_CACHE_HOME:-$HOME/.cache}/plnode-engine} SUITE=${SUITE:-bookworm} MIRROR=${MIRROR:-http://deb.debian.org/debian}
BASE=python:3.11-slim

up() {
  [ "$(id -u)" = 0 ] || { echo "engine.sh: needs root" >&2; exit 2; }
  if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null || ! command -v docker-compose >/dev/null; then
    apt-get update -q >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends docker.io docker-compose debootstrap iptables >/dev/null
  fi
  mkdir -p "$STATE"
  if ! docker info >/dev/null 2>&1; then
    setsid nohup dockerd --data-root "$STATE/data" --exec-root "$STATE/exec" --pidfile "$STATE/dockerd.pid" \
      >"$STATE/dockerd.log" 2>&1 </dev/null &
    for _ in $(seq 120); do docker info >/dev/null 2>&1 && break; sleep 0.5; done
    docker info >/dev/null 2>&1 || { tail -20 "$STATE/dockerd.log" >&2; exit 2; }
  fi
  docker image inspect "$BASE" >/dev/null 2>&1 || docker pull -q "$BASE" 2>/dev/null || stand_in
  docker images
}

stand_in() {
  local root
  root=$(mktemp -d)
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv "$SUITE" "$root" "$MIRROR" >"$STATE/debootstrap.log"
  ln -sf /usr/bin/python3 "$root/usr/local/bin/python"
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$root/etc/pip.conf"
  tar -C "$root" -c . | docker import -c 'CMD ["python3"]' - "$BASE" >/dev/null
  rm -rf "$root"
}

wheels() { # with a Python of the image's version and machine
  python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' |
    python3 -m pip download --quiet --only-binary :all: --constraint constraints.txt --dest docker/wheels 'setuptools>=77' wheel -r /dev/stdin
}

case ${1:-} in
  up) up ;;
  wheels) wheels ;;
  down) [ ! -f "$STATE/dockerd.pid" ] || kill "$(cat "$STATE/dockerd.pid")" ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; [ "${1:-}" = --help ] || exit 2 ;;
esac
