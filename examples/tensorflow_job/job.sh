#!/bin/bash
# Usage: ./job.sh WORKERS SAVE_DIR STEPS. Runs a job of several TensorFlow workers on this host. When a worker fails,
# the script ends the other workers and starts all of them again, from the last checkpoint.
workers=$1 save_dir=$2 steps=$3 restarts=${RESTARTS:-3} port=${PORT:-12340}
addresses=$(for ((i = 0; i < workers; i++)); do printf '"127.0.0.1:%d",' $((port + i)); done)

stop() {  # ends all workers
  kill -TERM "${pids[@]}" 2> /dev/null
  for _ in {1..50}; do kill -0 "${pids[@]}" 2> /dev/null || break; sleep 0.1; done
  kill -KILL "${pids[@]}" 2> /dev/null
  wait
}
trap 'ended=1; stop; exit 75' TERM INT

for ((start = 0; start <= restarts; start++)); do
  pids=()
  for ((i = 0; i < workers; i++)); do
    TF_CONFIG="{\"cluster\": {\"worker\": [${addresses%,}]}, \"task\": {\"type\": \"worker\", \"index\": $i}}" \
      "${PYTHON:-python}" "$(dirname "$0")/train_tf.py" "$save_dir" "$steps" &
    pids+=($!)
  done
  code=0
  for ((i = 0; i < workers; i++)); do
    wait -n "${pids[@]}" || { code=$?; break; }
  done
  [ "$code" -eq 0 ] && exit 0
  echo "start $start ended with $code"
  stop
done
exit "$code"
