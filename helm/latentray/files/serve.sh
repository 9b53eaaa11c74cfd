#!/bin/bash
# A node of the Ray cluster that runs `latentray serve`. The container ends when either of the two does.
#
# KUBERAY_GEN_RAY_START_CMD: KubeRay's `ray start ... --block`. LATENTRAY_CONFIG: the file of settings.
# DRAIN_SECONDS: how long live requests may go on after SIGTERM. STARTUP_SECONDS: for how long exit code 4
# (Ray or the worker pods are not there yet) means "try again in RETRY_SECONDS" and not "restart the container".
set -u
ulimit -n 65536 2>/dev/null || true

serve=
stopping=

stop() {
  stopping=yes
  if [[ -n $serve ]]; then kill -TERM "$serve" 2>/dev/null; fi
}
trap stop TERM INT

# A session of its own: a signal to our process group must not take the shards away before serve has drained.
setsid bash -c "exec $KUBERAY_GEN_RAY_START_CMD" &
ray=$!

alive() { kill -0 "$1" 2>/dev/null; }

finish() {
  kill -TERM "$ray" 2>/dev/null
  wait "$ray"
  exit "$1"
}

while [[ -z $stopping ]]; do
  latentray serve --drain-timeout "${DRAIN_SECONDS:-30}" &
  serve=$!
  # A signal that came while serve had no number yet.
  if [[ -n $stopping ]]; then kill -TERM "$serve"; fi
  while alive "$serve" && alive "$ray"; do
    wait -n "$serve" "$ray"  # also returns for a signal, when its trap has run
  done
  if ! alive "$ray"; then
    echo "serve.sh: the Ray node has ended" >&2
    kill -TERM "$serve" 2>/dev/null
    for _ in {1..50}; do alive "$serve" && sleep 0.1; done
    kill -KILL "$serve" 2>/dev/null
    exit 1
  fi
  wait "$serve"
  status=$?
  serve=
  if [[ -n $stopping || $status -ne 4 || $SECONDS -ge ${STARTUP_SECONDS:-1800} ]]; then finish "$status"; fi
  sleep "${RETRY_SECONDS:-5}" &
  wait $!
done
finish 0
