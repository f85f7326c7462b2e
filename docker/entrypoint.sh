#!/bin/sh
# From the environment of a container to one `plnode` process, which takes this one's place: signals and exit codes are its own.
#
#   join [FLAG...]      a node; needs PLNODE_SEEDS and PLNODE_MANIFEST (the default)
#   seed [FLAG...]      a seed; needs nothing
#   anything else       as on the command line: --help, status, run plan FILE, exits 137 ...
#
# PLNODE_SEEDS is the path of a seed list, or the seeds themselves, "host:port,ID@host:port".  What is wrong ends with exit code 2 and
# the variable's name, before anything else has happened; a restart would meet it again.
set -eu

refuse() { # what, remedy
  echo "plnode: $1" >&2
  echo "  $2" >&2
  echo "  exit code 2: wrong input; a restart does not help" >&2
  exit 2
}

readable() { # VARIABLE path
  [ -e "$2" ] || refuse "$1: there is no file $2 in this container" "Mount it, e.g. -v \"\$PWD/FILE:$2:ro\", and name its path inside the container."
  [ -f "$2" ] || refuse "$1: $2 is not a file" "A mount whose source is missing on the host becomes an empty folder: check the path there."
  [ -r "$2" ] || refuse "$1: $2 cannot be read by user $(id -u)" "On the host: chmod a+r the file, or run the container with --user."
}

writable() {
  data=${PLNODE_DATA:-}
  [ -n "$data" ] || refuse "PLNODE_DATA: is empty" "Name the folder for key, cache and snapshots, as the image does: PLNODE_DATA=/data"
  [ -d "$data" ] || refuse "PLNODE_DATA: there is no folder $data in this container" "Mount one, e.g. -v plnode-data:$data"
  probe="$data/.writable.$$"
  if ! (: >"$probe") 2>/dev/null; then
    refuse "PLNODE_DATA: user $(id -u) cannot write into $data" \
      "It belongs to user $(stat -c %u "$data"): run with --user $(stat -c %u:%g "$data"), use a named volume, or chown the folder to $(id -u)."
  fi
  rm -f "$probe"
}

seeds() { # a list in the variable becomes a file, since that is what the node reads (again, when it changes)
  case $PLNODE_SEEDS in
    /ip4/* | /ip6/* | /dns/* | /dns4/* | /dns6/*) ;; # a long address
    *:[0-9]*) ;;
    */*) readable PLNODE_SEEDS "$PLNODE_SEEDS"; return ;;
  esac
  list="$PLNODE_DATA/PLNODE_SEEDS" # named so because messages about a wrong entry name the file
  { echo "# from the variable of this name; written at every start"; echo "$PLNODE_SEEDS" | tr ', ' '\n\n'; } >"$list"
  PLNODE_SEEDS=$list
}

case ${1:-join} in
  join)
    [ $# -eq 0 ] || shift
    case " $* " in *" --help "* | *" -h "*) exec plnode join --help ;; esac
    [ -n "${PLNODE_SEEDS:-}" ] || refuse "PLNODE_SEEDS: is not set" \
      "Give the seeds that the run's owner publishes, e.g. -e PLNODE_SEEDS=seed.example:4000, or the path of a mounted list."
    [ -n "${PLNODE_MANIFEST:-}" ] || refuse "PLNODE_MANIFEST: is not set" \
      "Mount the signed run file and name it: -v \"\$PWD/run.signed:/run.signed:ro\" -e PLNODE_MANIFEST=/run.signed"
    readable PLNODE_MANIFEST "$PLNODE_MANIFEST"
    writable
    seeds
    manifest=$PLNODE_MANIFEST
    unset PLNODE_MANIFEST # no setting of the node, which refuses names that it does not know
    exec plnode join --manifest "$manifest" "$@"
    ;;
  seed)
    shift
    case " $* " in *" --help "* | *" -h "*) exec plnode seed --help ;; esac
    unset PLNODE_MANIFEST
    writable
    [ -z "${PLNODE_SEEDS:-}" ] || seeds
    [ -n "${PLNODE_SEEDS:-}" ] || unset PLNODE_SEEDS
    exec plnode seed "$@"
    ;;
  *) exec plnode "$@" ;;
esac
