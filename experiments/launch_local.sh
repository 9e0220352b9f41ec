#!/usr/bin/env bash
# Starts N processes of generate.py on this machine, which share one program.
#
#   experiments/launch_local.sh N DEVICES_PER_PROCESS --target=... [flags]
#
# Each process has DEVICES_PER_PROCESS CPU devices. stdout is that of process
# 0; stderr has a prefix for each. When one fails, the others are ended and
# its exit code is this script's. PYTHON is the interpreter (default python3).
set -uo pipefail

fail() { echo "launch_local.sh: $*" >&2; exit 2; }
is_count() { [[ $1 =~ ^[1-9][0-9]{0,3}$ ]]; }

[ $# -ge 2 ] || fail 'usage: launch_local.sh N DEVICES_PER_PROCESS [flags].'
is_count "$1" || fail "N must be in 1..9999, got '$1'."
is_count "$2" || fail "DEVICES_PER_PROCESS must be in 1..9999, got '$2'."
num_processes=$1
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=$2
shift 2
script=$(dirname "${BASH_SOURCE[0]}")/generate.py
python=${PYTHON:-python3}

port=$("$python" -c 'import socket
with socket.create_server(("127.0.0.1", 0)) as s: print(s.getsockname()[1])') ||
  fail "cannot run $python; set PYTHON."

exec 3>&1 4>/dev/null
pids=()
end_all() { # end_all SIGNAL
  for pid in "${pids[@]}"; do kill "-$1" "$pid" 2>/dev/null; done
}
stop() { # stop CODE: nothing is left behind
  trap '' INT TERM HUP
  end_all TERM
  {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
      [ -n "$(jobs -pr)" ] || break
      sleep 0.2
    done
    end_all KILL
    wait
  } 2>/dev/null # Bash would report each that was killed.
  exit "$1"
}
trap 'echo "launch_local.sh: interrupted; ended all." >&2; stop 130' INT
trap 'stop 143' TERM HUP

for ((i = 0; i < num_processes; i++)); do
  out=4
  [ "$i" -ne 0 ] || out=3
  "$python" "$script" "$@" --coordinator="127.0.0.1:$port" \
    --num_processes="$num_processes" --process_id="$i" </dev/null >&"$out" \
    3>&- 4>&- 2> >(trap '' INT; exec sed -u "s/^/[$i] /" >&2) &
  pids+=($!)
done

for ((left = num_processes; left > 0; left--)); do
  wait -n -p ended "${pids[@]}" 2>/dev/null
  code=$?
  for i in "${!pids[@]}"; do
    [ "${pids[$i]}" = "$ended" ] || continue
    unset "pids[$i]"
    if [ "$code" -ne 0 ]; then
      echo "launch_local.sh: process $i ended with code $code; ending the" \
        'others.' >&2
      stop "$code"
    fi
  done
done
