#!/bin/sh
# Healthy: the node's own event loop answers on its status socket.  A node that waits for others is healthy; `plnode status` says
# for what.  The reason of a refusal is what `docker inspect` shows.  Docker reserves the exit codes above 1.
plnode status --json >/dev/null || exit 1
