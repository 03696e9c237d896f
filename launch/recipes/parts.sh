# Functions that the scripts of these recipes share; `source` it.
# shellcheck shell=bash

# Wait for a training command and return an exit code that says what to do next; SIGTERM is passed on to it.
#   0     the run is finished
#   75    it was told to stop, has saved, and the same command goes on (a program that saves ends with 0 itself)
#   2     somebody has to mend what its last line names: do not start it again
#   other a fault, such as a host that is gone (1), or servers that are away (69): start it again, so and so many times
run_to_end() {
  local child="" code told=""
  trap 'told=early; if [ -n "$child" ]; then told=passed_on; kill -TERM "$child" 2>/dev/null; fi' TERM INT HUP
  # In a group of its own, or a terminal's Ctrl-C would reach the command too: SIGTERM has it save, SIGINT does not.
  set -m
  "$@" &
  child=$!
  set +m
  if [ "$told" = early ]; then kill -TERM "$child" 2>/dev/null; fi # once: a second one may end what saves
  while true; do # a signal ends `wait`, not the child
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  trap - TERM INT HUP
  if [ -n "$told" ] && [ "$code" = 0 ]; then code=75; fi
  return "$code"
}

# The Python of a checkout's .venv; where it has none, that of the active environment.
python_of() {
  local own=$1/.venv/bin/python
  if [ -x "$own" ]; then echo "$own"; else echo python; fi
}

# A key of its own for each purpose, readable for nobody else; one that is there stays.
make_key() {
  local file=$1
  [ -s "$file" ] || (umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >"$file")
}

# Ports that are free now.
free_ports() {
  "$PYTHON" -c 'import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in held: one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in held))' "$1"
}

STARTED=()

# start NAME COMMAND...: in the background, with its output in $LOGS/NAME.log; started again when it ends, until five
# starts in a row have ended within STEADY_SECONDS.
start() {
  local name=$1
  shift
  # A session of its own, so that `stop_all` ends what it starts, too.
  # shellcheck disable=SC2016 # expanded by the inner shell
  STEADY_SECONDS=${STEADY_SECONDS:-600} PAUSE_SECONDS=${PAUSE_SECONDS:-2} setsid bash -c 'for ((i = 0; i < 6; i++)); do
    SECONDS=0; "$@"; echo "ended with $?"; if ((SECONDS >= STEADY_SECONDS)); then i=-1; fi; sleep "$PAUSE_SECONDS"
  done' "$name" "$@" >>"$LOGS/$name.log" 2>&1 &
  STARTED+=($!)
}

# End what `start` has started.
stop_all() {
  local pid
  for pid in "${STARTED[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for ((i = 0; i < 50; i++)); do
    local alive=""
    for pid in "${STARTED[@]}"; do if kill -0 -- "-$pid" 2>/dev/null; then alive=yes; fi; done
    [ -n "$alive" ] || return 0
    sleep 0.2
  done
  for pid in "${STARTED[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}

# await NAME URL SECONDS: until it answers; fails with the end of its log.
await() {
  local name=$1 url=$2 seconds=$3
  for ((i = 0; i < seconds * 2; i++)); do
    if "$PYTHON" -c 'import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5)' "$url" 2>/dev/null; then return 0; fi
    sleep 0.5
  done
  echo "$name does not answer at $url after $seconds s; its log ends so:" >&2
  tail -n 20 "$LOGS/$name.log" >&2
  return 1
}
